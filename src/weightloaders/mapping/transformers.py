"""The renames and conversions that transformers declares for a model, as a mapper.

transformers keeps them in pieces that are not public (`core_model_loading`, `conversion_mapping`; verified with 5.24).
Each is asked for when it is needed; where one is not there or has changed, names are taken as they are and the report
says so.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from weightloaders.errors import RuleError
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.names import Claim, Group, as_index
from weightloaders.mapping.quantised import one_by_one, quantisation_of
from weightloaders.mapping.spaces import Untraceable
from weightloaders.mapping.symbolic import SymbolicTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

logger = logging.getLogger(__name__)


class HasDtype(Protocol):
    """A tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is to have."""


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


def pending_ties(model: nn.Module) -> dict[str, str]:
    """The declared ties that are still to be made: transformers makes them when a model on meta has its weights.

    Whatever has memory is tied where it shares memory, and nowhere else; a model may have been changed since its config
    was written.
    """
    declared = tied_names(model)
    on_meta = (
        {n for n, p in model.named_parameters(remove_duplicate=False) if p.device.type == "meta"} if declared else ()
    )
    return {name: other for name, other in declared.items() if name in on_meta and other in on_meta}


class ConversionMapper:
    """transformers' conversions for a model.

    Names must be claimed in natural order: some of transformers' renames wait for a name that comes first.

    Args:
        model: A transformers model, on any device.
        own: Its names, with what has the dtype that each is to have.
    """

    automatic = False

    def __init__(self, model: nn.Module, own: Mapping[str, HasDtype]) -> None:
        self._model = model
        self._own = own
        self._prefix = getattr(model, "base_model_prefix", "") or None
        self._rename: Any = None
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._by_pattern: dict[str, Any] = {}
        self._indices: dict[str, re.Pattern[str]] = {}
        self._quantisation = quantisation_of(model)
        # For each target, and each pattern that leads there, the name of one source.
        self._sources: dict[str, dict[str, str]] = defaultdict(dict)
        try:
            from transformers import conversion_mapping, core_model_loading

            quantizer = self._quantisation.quantizer if self._quantisation else None
            transforms = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=quantizer)
            if self._quantisation:
                self._quantisation.transforms = transforms
            self._renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
            self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
            self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
            self._indices = {p: re.compile(_with_index(p)) for p in self._by_pattern if "*." in p}
            self._rename = core_model_loading.rename_source_key
        except (ImportError, AttributeError, TypeError, re.error) as error:
            logger.warning("transformers' conversions are not used: this version keeps them elsewhere (%s)", error)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        if self._rename is None:
            return None
        renamed, pattern = self._rename(name, self._renamings, self._converters, self._prefix, self._own)
        if renamed not in self._own and name in self._own:
            renamed, pattern = self._rename(name, [], [], self._prefix, self._own)
        if pattern is None and name in self._own and self._rename(name, self._renamings, self._converters)[0] == name:
            # transformers would strip or add the base model's prefix all the same, and exchange two such parameters.
            return None
        if pattern is None:
            return None if renamed == name else Claim(renamed, (f"transformers: {name} -> {renamed}",))
        converter = self._by_pattern[pattern]
        if self._quantisation:
            self._sources[renamed][pattern] = name
        group = Group(
            key=("transformers", renamed),
            slots=tuple(converter.source_patterns),
            lists=tuple(p in self._indices for p in converter.source_patterns),
            # Of several only the first is known by name; without it transformers takes none of them.
            targets=(renamed,),
            function=_Conversion(self, converter, renamed),
            rule=f"transformers: {' + '.join(map(repr, converter.operations))}",
            # Some conversions take scales that only the quantised variant of a checkpoint has.
            lenient=True,
            suffices=self._quantisation.suffices
            if self._quantisation and self._quantisation.loads(converter)
            else None,
        )
        slot = converter.source_patterns.index(pattern)
        index = self._index(name, pattern) if group.lists[slot] else None
        return Claim(group=group, slot=slot, index=index, rules=(group.rule,))

    def _index(self, name: str, pattern: str) -> int | None:
        """The number that the pattern's ``*`` stands for in a name: the expert's."""
        match = self._indices[pattern].search(name)
        if match is not None:
            return as_index(match["index"])
        # The name was renamed before it met the pattern: the last number in front of the leaf is the expert's.
        numbers = [n for segment in name.split(".") if (n := as_index(segment)) is not None]
        return numbers[-1] if numbers else None

    def conversion_again(
        self, target: str, patterns: Sequence[str], operations: Sequence[str], sources: Mapping[str, str]
    ) -> Callable[[Sequence[Any]], dict[str, torch.Tensor]] | None:
        """The function of a group of an earlier plan; None where transformers has no such conversion for the model now.

        Args:
            target: The first parameter that it makes.
            patterns: transformers' patterns of its sources.
            operations: The names of transformers' operations.
            sources: Pattern -> the name of one source.
        """
        converter = self._by_pattern.get(patterns[0]) if patterns else None
        if converter is None or (list(patterns), list(operations)) != _told_by(converter):
            return None
        if self._quantisation:
            self._sources[target].update(sources)
        return _Conversion(self, converter, target)

    def sources_of(self, target: str) -> dict[str, str]:
        """Of each pattern that leads to a target, the name of one source, where the checkpoint is quantised."""
        return dict(self._sources.get(target, {}))

    def convert(
        self, tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]], converter: Any, target: str
    ) -> dict[str, torch.Tensor]:
        """Run a conversion of transformers for one group."""
        wanted = self._own[target].dtype if target in self._own else None
        found = {
            pattern: [parts] if isinstance(parts, torch.Tensor) else parts
            for pattern, parts in zip(converter.source_patterns, tensors, strict=True)
        }
        run = copy.deepcopy(converter)
        if self._quantisation and self._quantisation.loads(converter):
            if self._quantisation.has_codes(found, self._sources[target]):
                if any(isinstance(part, SymbolicTensor) for parts in found.values() for part in parts):
                    raise Untraceable(f"{self._quantisation.method} codes are multiplied by their scales")
                self._quantisation.multiply_by_own_means(run)
                # The scales are not the model's to cast.
                return one_by_one(run, found, lambda part: self._run(run, target, part, None))
            if len(converter.operations) == 1 and (weight := self._quantisation.plain_weight(found)) is not None:
                return {target: weight}
        return self._run(run, target, found, wanted)

    def _run(
        self, run: Any, target: str, found: Mapping[str, Sequence[torch.Tensor]], wanted: torch.dtype | None
    ) -> dict[str, torch.Tensor]:
        is_mixed = len({part.dtype for parts in found.values() for part in parts}) > 1
        for pattern, parts in found.items():
            for part in parts:
                # Where all are codes, what they make is no match for the model's dtype, and that is said then.
                if wanted is not None and is_mixed and not may_cast(part.dtype, wanted):
                    raise RuleError(
                        f"one of the tensors {pattern} has {part.dtype} values, which can't become {wanted} by a cast",
                        hint="integers and 8-bit codes are usually quantised weights: build the model with the "
                        "checkpoint's quantization_config, or convert the checkpoint to plain weights first",
                    )
                # What is arithmetic is done in the model's dtype, as transformers does it; a plain move is cast later.
                cast = type(part) is torch.Tensor and wanted is not None and may_cast(part.dtype, wanted)
                run.add_tensor(target, target, pattern, part.to(wanted) if cast else part)
        results = run.convert(target, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A conversion of transformers for one group, which can say what makes it again (see `mapping.recipes`).

    Attributes:
        concurrent: Whether several groups may be converted at once, on any threads.
    """

    concurrent: ClassVar[bool] = True

    mapper: ConversionMapper
    converter: Any
    target: str

    def __call__(self, tensors: Sequence[Any]) -> dict[str, torch.Tensor]:
        return self.mapper.convert(tensors, self.converter, self.target)

    def as_data(self) -> dict[str, Any]:
        patterns, operations = _told_by(self.converter)
        sources = self.mapper.sources_of(self.target)
        return {
            "kind": "transformers",
            "target": self.target,
            "patterns": patterns,
            "operations": operations,
            "sources": sources,
        }


def _told_by(converter: Any) -> tuple[list[str], list[str]]:
    """What tells a conversion of transformers from its others."""
    return list(converter.source_patterns), [type(operation).__name__ for operation in converter.operations]


def _with_index(pattern: str) -> str:
    """A pattern of transformers as a regular expression that tells what its ``*.`` stands for."""
    first, _, rest = pattern.partition("*.")
    return first + r"(?P<index>[^.]*)\." + rest.replace("*.", r".*\.")
