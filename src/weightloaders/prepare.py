"""What comes before a load: arguments are checked, the loader is found, a transformers model is built.

Names are checked first: who mistyped one hears of it before the network is asked for anything, or a file is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders.dispatch import check_accelerate, dispatch, inferred_map
from weightloaders.errors import ConfigError, SourceNotFoundError
from weightloaders.loaders.place import as_name
from weightloaders.loading import LoadContext, get_weights, load, load_given
from weightloaders.mapping.parsing import parse_rules
from weightloaders.offers import name_of
from weightloaders.plan import Policies, PolicyOption
from weightloaders.registry import WeightLoaderRegistry
from weightloaders.skeleton import HUB_OPTIONS, Skeleton, build_skeleton, stored_dtype_of
from weightloaders.transfer.device_map import CPU, DeviceMap
from weightloaders.transfer.options import TransferOption, TransferOptions
from weightloaders.transfer.verify import Verification
from weightloaders.weights.folder import FolderListing, is_temporary, kind_of
from weightloaders.weights.habits import asked_for
from weightloaders.weights.source import FileSource
from weightloaders.weights.texts import brief
from weightloaders.weights.weights import Weights, as_catalogue, as_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from weightloaders.loaders.base import BaseWeightLoader
    from weightloaders.progress import ProgressOption
    from weightloaders.report import LoadReport
    from weightloaders.transfer.device_map import DeviceOption
    from weightloaders.transfer.verify import VerifyOption

logger = logging.getLogger(__name__)


def load_context(
    rules: Any = None,
    on_missing: PolicyOption = "error",
    on_unexpected: PolicyOption = "warn",
    on_mismatch: PolicyOption = "error",
    device: DeviceOption = None,
    progress: ProgressOption = None,
    verify: VerifyOption | None = None,
    automatic: bool = True,
    transfer: TransferOption = "direct",
    device_map: DeviceOption = None,
) -> LoadContext:
    """What a load is asked to do, checked. See `load_into` and `from_pretrained` for the arguments.

    Raises:
        ConfigError: If there is no such device here, devices were named in two ways, there is no such check,
            ``automatic`` is neither True nor False, ``transfer`` is not allowed, or ``WEIGHTLOADERS_STORAGE`` is not.
        RuleError: If the rules or the policies can't be understood.
    """
    if not isinstance(automatic, bool):
        raise ConfigError(f"automatic={automatic!r}: True or False is expected")
    # What the environment asks for is an option as well: it is refused before anything is touched.
    asked_for()
    return LoadContext(
        rules=parse_rules(rules),
        policies=Policies(on_missing, on_unexpected, on_mismatch),
        device=_devices(device, device_map),
        progress=progress,
        verify=Verification.of(verify),
        automatic=automatic,
        transfer=TransferOptions.of(transfer),
    )


def _devices(device: DeviceOption, device_map: DeviceOption) -> DeviceMap:
    if device_map is None:
        return CPU if device is None else DeviceMap.of(device, "device")
    # The CPU is where a model goes about which nothing was said.
    if device is not None and str(device) != "cpu":
        raise ConfigError(f"device={brief(device)} and device_map={brief(device_map)} say the same thing twice")
    return DeviceMap.of(device_map)


def check_companions(folder: Path, patterns: Sequence[str], context: LoadContext) -> None:
    """Hold files beside the weights that are about to be used against their checksums, where that was asked for.

    They count as files that the load reads, too, so that hooks are told of them.

    Args:
        folder: Where they lie.
        patterns: Globs of their names.
        context: What was asked for.

    Raises:
        SourceError: If one has another checksum, or what should list them is no such list.
    """
    # What was made of the weights' own files is as good as these.
    if is_temporary(folder):
        return
    names = sorted(name for name in FolderListing(folder).names if any(fnmatchcase(name, p) for p in patterns))
    # What is no file can't be used either.
    files = [FileSource(folder / name) for name in names if kind_of(folder / name) is None]
    context.verify.check_companions(files)
    context.companions.extend(files)


def resolve_loader(source: Any, loader: Any, options: Mapping[str, Any]) -> BaseWeightLoader | None:
    """The loader for a source; None where the weights themselves were given.

    Raises:
        WeightLoadersError: If there is no such loader, or it does not take the options, or these are no weights.
    """
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable):
            as_weights(source)  # which refuses it
        if options or loader != "auto":
            raise ConfigError("weights themselves were given, so no loader takes part", hint="leave out the loader")
        return None
    return WeightLoaderRegistry.resolve(loader, options, source=as_name(source))


def load_from(model: nn.Module, source: Any, loader: BaseWeightLoader | None, context: LoadContext) -> LoadReport:
    """Fill a model from a source through its loader, or from weights themselves."""
    if loader is None:
        return load_given(model, source, context)
    return load(model, loader, as_name(source), context.changed(loader=name_of(loader)))


# ------------------------------------------------------------------ transformers models


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transformers model that is built, with what is to fill it.

    Attributes:
        skeleton: The model.
        source: Where the weights lie; or weights themselves.
        loader: Who describes them.
        context: What the load was asked to do.
        hub_options: What finds the model's other files, its tokenizer for one, where its config was found.
    """

    skeleton: Skeleton
    source: Any
    loader: BaseWeightLoader | None
    context: LoadContext
    hub_options: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.skeleton.model

    def fill(self) -> LoadReport:
        """Fill the model and finalise it."""
        report = load_from(self.model, self.source, self.loader, self.context)
        for warning in self.skeleton.finalise(report.loaded):
            logger.warning("%s", warning)
            report.warnings.append(warning)
        if len(self.context.device.devices) > 1:
            dispatch(self.model, self.context.device)
        return report


def prepare(
    source: str | Path | None,
    context: LoadContext,
    *,
    weights: Any = None,
    loader: Any = "auto",
    loader_kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | str = "auto",
    **model_kwargs: Any,
) -> Prepared:
    """All of `from_pretrained` but the filling: the names are checked, then the config is found, and the model built.

    Args:
        source: See `from_pretrained`.
        context: See `load_context`.
        weights: See `from_pretrained`.
        loader: See `from_pretrained`.
        loader_kwargs: See `from_pretrained`.
        dtype: See `from_pretrained`.
        **model_kwargs: See `from_pretrained`; also what `build_skeleton` takes.

    Raises:
        WeightLoadersError: See `from_pretrained`.
    """
    if not isinstance(source, str | Path | None):
        raise ConfigError(f"a model is named by its folder or hub id, not by {source!r}")
    where = weights if weights is not None else source
    if where is None:
        raise SourceNotFoundError("neither a source nor weights were given")
    options = loader_kwargs or {}
    resolved = resolve_loader(where, loader, options)
    # What finds the weights in their repository may name a revision that the config's does not have.
    hub_options = {key: options[key] for key in HUB_OPTIONS if weights is None and key in options}
    hub_options |= {key: model_kwargs.pop(key) for key in HUB_OPTIONS if key in model_kwargs}
    devices = context.device
    if devices.strategy or len(devices.devices) > 1:
        check_accelerate("a model over several devices")
    skeleton = build_skeleton(
        None if source is None else as_name(source),
        dtype=dtype,
        stored_dtype=lambda: _stored_dtype(where, resolved),
        hub_options=hub_options,
        devices=devices,
        loader=resolved if weights is None else None,
        admit=partial(check_companions, context=context),
        **model_kwargs,
    )
    if devices.strategy:
        quantisation = skeleton.quantisation
        devices = inferred_map(
            skeleton.model, devices.strategy, None if quantisation is None else quantisation.quantizer
        )
    # What could not be built on meta is on the CPU.
    if not any(parameter.is_meta for parameter in skeleton.model.parameters()):
        devices.move(skeleton.model)
    return Prepared(skeleton, where, resolved, context.changed(dtypes=skeleton.dtypes, device=devices), hub_options)


def _stored_dtype(source: Any, resolved: Any) -> torch.dtype | None:
    if resolved is None:
        # A stream can be read only once, so it can't be looked at before.
        return stored_dtype_of(as_catalogue(source)) if isinstance(source, Weights | dict) else None
    weights = get_weights(resolved, as_name(source))
    if not isinstance(weights, Weights | dict):
        return None
    with as_catalogue(weights) as catalogue:
        return stored_dtype_of(catalogue)
