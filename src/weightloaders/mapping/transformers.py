"""The renames and conversions that transformers declares for a model, as a mapper.

transformers keeps them in pieces that are not public (`core_model_loading`, `conversion_mapping`; verified with 5.24).
Each is asked for when it is needed; where one is not there or has changed, names are taken as they are and the report
says so.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.mapping.names import Claim, Group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

logger = logging.getLogger(__name__)


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model is one of transformers', without importing it for those that are not."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def ignored_patterns(model: nn.Module) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """What the model says may be missing, and what may be unexpected (``_keys_to_ignore_on_load_*``)."""
    patterns = []
    for attribute in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):
        declared = getattr(model, attribute, None) or ()
        declared = [declared] if isinstance(declared, str) else declared
        patterns.append(re.compile("|".join(f"(?:{p})" for p in declared)) if declared else None)
    return patterns[0], patterns[1]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Tied parameter -> the one it is tied to, as the config declares it."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def natural_order(name: str) -> list[tuple[int, Any]]:
    """A sort key in which ``layers.2`` comes before ``layers.10``."""
    return [(0, int(s)) if s.isdecimal() else (1, s) for s in name.split(".")]


class ConversionMapper:
    """transformers' conversions for a model.

    Args:
        model: A transformers model, on any device.
        own: Its names with their tensors.
    """

    automatic = False

    def __init__(self, model: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._own = dict(own)
        self._prefix = getattr(model, "base_model_prefix", "") or None
        self._rename: Any = None
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._by_pattern: dict[str, Any] = {}
        try:
            from transformers import conversion_mapping, core_model_loading

            transforms = conversion_mapping.get_model_conversion_mapping(model)
            self._renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
            self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
            self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
            self._rename = core_model_loading.rename_source_key
        except (ImportError, AttributeError, TypeError) as error:
            logger.warning("transformers' conversions are not used: this version keeps them elsewhere (%s)", error)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        if self._rename is None:
            return None
        renamed, pattern = self._rename(name, self._renamings, self._converters, self._prefix, self._own)
        if renamed not in self._own and name in self._own:
            renamed, pattern = self._rename(name, [], [], self._prefix, self._own)
        if pattern is None:
            return None if renamed == name else Claim(renamed, (f"transformers: {name} -> {renamed}",))
        converter = self._by_pattern[pattern]
        rule = f"transformers: {' + '.join(map(repr, converter.operations))}"
        group = Group(
            key=("transformers", renamed),
            slots=tuple(converter.source_patterns),
            # Its operations take a list a pattern, of one tensor or of one an expert.
            lists=(True,) * len(converter.source_patterns),
            targets=(renamed,) if len(converter.target_patterns) == 1 else (),
            function=functools.partial(self._convert, converter=converter, target=renamed),
            rule=rule,
            indexed=any("*" in p for p in converter.source_patterns),
        )
        index = _expert_index(name, pattern) if group.indexed else None
        return Claim(
            group=group,
            slot=converter.source_patterns.index(pattern),
            index=natural_order(name) if index is None else index,
            rules=(rule,),
        )

    def _convert(
        self, tensors: Sequence[Sequence[torch.Tensor]], *, converter: Any, target: str
    ) -> dict[str, torch.Tensor]:
        run = copy.deepcopy(converter)
        wanted = self._own[target].dtype if target in self._own else None
        for pattern, parts in zip(run.source_patterns, tensors, strict=True):
            for part in parts:
                # What is arithmetic is done in the model's dtype, as transformers does it; a plain move is cast later.
                needs_cast = type(part) is torch.Tensor and wanted is not None and part.is_floating_point()
                run.add_tensor(target, target, pattern, part.to(wanted) if needs_cast else part)
        results = run.convert(target, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _expert_index(name: str, pattern: str) -> int | None:
    """The number that the pattern's ``*`` stands for in a name, e.g. the expert's."""
    if "*" not in pattern:
        return None
    match = re.search(re.sub(r"\\\*", r"([^.]+)", re.escape(pattern.lstrip("^").rstrip("$"))), name)
    if match is None:
        # The name was renamed before it met the pattern: the last number in front of the leaf is the expert's.
        numbers = [s for s in name.split(".") if s.isdecimal()]
        return int(numbers[-1]) if numbers else None
    return int(match.group(1)) if match.group(1).isdecimal() else None
