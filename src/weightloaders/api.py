"""The functions that users call: open, plan, load, save."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from weightloaders.errors import ConfigError, ModelError, SaveError
from weightloaders.loaders.headers_only import headers_only
from weightloaders.loaders.place import as_name
from weightloaders.loading import (
    get_weights,
    is_borrowed,
    load_aside,
    load_origin,
    make_plan,
    origin_of,
    prove_plan,
    usable,
)
from weightloaders.plan import Policies
from weightloaders.prepare import load_context, load_from, prepare, resolve_loader
from weightloaders.registry import WeightLoaderRegistry
from weightloaders.saving import checkpoint_layout
from weightloaders.targets import Targets
from weightloaders.transfer.options import TransferOption, TransferOptions
from weightloaders.validation import parse_size
from weightloaders.weights.safetensors import write_safetensors, write_sharded
from weightloaders.weights.texts import brief
from weightloaders.weights.weights import Weights, as_catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from weightloaders.loading import Origin
    from weightloaders.mapping.recipes import Trusted
    from weightloaders.plan import LoadPlan, PolicyOption
    from weightloaders.progress import ProgressOption
    from weightloaders.report import LoadReport
    from weightloaders.transfer.device_map import DeviceOption
    from weightloaders.transfer.verify import VerifyOption
    from weightloaders.weights.safetensors import Described

Layout = Literal["model", "checkpoint"]

# What `plan_load` was asked to do where nothing was said.
_AS_PLANNED = (None, "error", "warn", "error", True)


def open_weights(source: str | Path, loader: Any = "auto", **kwargs: Any) -> Weights:
    """Open a source and say what it holds. No data is read, and nothing is downloaded from the hub.

    Args:
        source: A folder, a file, a hub id, a web address, whatever the loader understands.
        loader: A loader's name, class or instance, or ``"package.module:Class"``.
        **kwargs: The loader's options.

    Returns:
        The weights; close them, or use them as a context manager. Tensors of a repository on the hub that is not in
        the cache are read from there, in parts.

    Raises:
        SourceError: If the source is not there or not whole.
        RegistryError: If there is no such loader.
        OptionsError: If the options don't suit the loader.
        ConfigError: If the source is no path or name.
    """
    with headers_only():
        return open_to_read(source, loader, **kwargs)


def open_to_read(source: str | Path, loader: Any = "auto", **kwargs: Any) -> Weights:
    """The same, for who will read all of it: what lies on the hub is downloaded into the cache first."""
    if not isinstance(source, str | Path):
        raise ConfigError(f"a source is a str or a Path, not {_a(source)}", hint="weights themselves need no opening")
    name = as_name(source)
    found = WeightLoaderRegistry.resolve(loader, kwargs, source=name)
    return as_catalogue(get_weights(found, name), borrowed=is_borrowed(found, name))


def plan_load(
    model: nn.Module,
    weights: Weights | Mapping[str, torch.Tensor] | str | Path,
    *,
    rules: Any = None,
    on_missing: PolicyOption = "error",
    on_unexpected: PolicyOption = "warn",
    on_mismatch: PolicyOption = "error",
    automatic: bool = True,
    loader: Any = "auto",
    loader_kwargs: Mapping[str, Any] | None = None,
    plan: LoadPlan | None = None,
    trust: Sequence[Trusted] = (),
    transfer: TransferOption = "direct",
    device: DeviceOption = None,
    verify: VerifyOption | None = None,
) -> LoadPlan:
    """Say what a load would do, from headers alone.

    Args:
        model: The model, on any device, meta included. It is not changed.
        weights: `Weights`, a dict of tensors, or a source to be opened.
        rules: Rules, as objects, as a mapping, as YAML or as a YAML file's path.
        on_missing: ``"error"``, ``"warn"``, ``"ignore"``, or a dict of name pattern -> one of these.
        on_unexpected: Likewise.
        on_mismatch: Likewise.
        automatic: Whether names may be matched without being asked: wrappers and one well-known prefix left out or put
            in, weight_norm's two spellings exchanged, rules of plugins applied. If not, only ``rules`` and what the
            model itself declares change names.
        loader: Who opens a source.
        loader_kwargs: Options for it.
        plan: A plan that was read back (`LoadPlan.from_json`): it is not made again, but proved against the model and
            the weights. It has rules and policies of its own.
        trust: The functions that such a plan may run, themselves or as ``"package.module:function"``. Ready-made
            layouts and transformers' conversions need not be named.
        transfer: How bytes are moved when the plan is run; see `load_into`.
        device: Where what is on meta goes then, and what the forecast is for; see `load_into`.
        verify: What is checked when the plan is run; see `load_into`.

    Returns:
        The plan; `LoadPlan.run` carries it out as long as the weights are open.

    Raises:
        PlanError: If the model or the weights are not those that ``plan`` was made for.
        RuleError: If rules or policies can't be understood, or ``plan`` would run a function that nobody trusts.
        ModelError: If the model can't be filled at all.
        SourceError: If the source can't be opened.
    """
    if plan is not None and (rules, on_missing, on_unexpected, on_mismatch, automatic) != _AS_PLANNED:
        raise ConfigError(
            "a plan that was read back was made by rules and policies of its own",
            hint="leave out rules, policies and automatic; or leave out plan, and a new one is made by them",
        )
    context = load_context(
        rules, on_missing, on_unexpected, on_mismatch, device, verify=verify, automatic=automatic, transfer=transfer
    )
    if isinstance(weights, str | Path):
        weights = open_weights(weights, loader, **(loader_kwargs or {}))
    if plan is not None:
        return prove_plan(model, as_catalogue(weights), plan, trust, context)
    return make_plan(model, as_catalogue(weights), context)


def load_into(
    model: nn.Module,
    source: Any,
    *,
    loader: Any = "auto",
    loader_kwargs: Mapping[str, Any] | None = None,
    device: DeviceOption = None,
    rules: Any = None,
    on_missing: PolicyOption = "error",
    on_unexpected: PolicyOption = "warn",
    on_mismatch: PolicyOption = "error",
    progress: ProgressOption = None,
    verify: VerifyOption | None = None,
    automatic: bool = True,
    transfer: TransferOption = "direct",
    atomic: bool = False,
) -> LoadReport:
    """Fill any module in place.

    Args:
        model: Any ``nn.Module``. Parameters on meta are materialised.
        source: A folder, a file, a hub id; or weights themselves: `Weights`, a dict of tensors, an iterable of pairs.
        loader: A loader's name, class or instance, or ``"package.module:Class"``.
        loader_kwargs: Its options.
        device: Where meta parameters are materialised: a device, or a dict of module names (``""`` for all the rest)
            to devices, of which the longest that fits counts. Default: the CPU.
        rules: Rules, as objects, as a mapping, as YAML or as a YAML file's path.
        on_missing: What is done about parameters that the source doesn't fill: ``"error"``, ``"warn"``, ``"ignore"``,
            or a dict of name pattern -> one of these.
        on_unexpected: Likewise for tensors that the model doesn't want.
        on_mismatch: Likewise for tensors that don't fit.
        progress: None: a bar on a terminal, a few log lines elsewhere; False: nothing; or a function.
        verify: Additional checks, one or several: ``"sha256"``: before anything is touched, the files are held against
            their checksums, ``{"sha256": path}`` or a `ChecksumList`: against those of that list alone;
            ``"finite"``: no NaN and no infinity; ``"record"``: the report has each parameter's own checksum, and the
            bytes that it came from (`LoadReport.provenance`).
        automatic: Whether names may be matched without being asked; see `plan_load`.
        transfer: How bytes are moved: ``"direct"``, ``"mmap"``, ``"o_direct"``, ``"stream"``, or `TransferOptions`.
        atomic: Whether the model is to keep its old values until all the new ones are there: if the load fails,
            it is as it was. That takes its memory once more, and it must have values already.

    Raises:
        ConfigError: If an argument is not allowed; nothing was opened.
        ModelError: If the model is none; with ``atomic``, if it can't be copied, or is on meta.
        PlanError: If something is missing or does not fit; nothing was touched.
        LoadError: If something failed on the way; the model is marked as half-loaded, or, with ``atomic``, untouched.
    """
    context = load_context(rules, on_missing, on_unexpected, on_mismatch, device, progress, verify, automatic, transfer)
    if atomic and context.transfer.mode == "mmap":
        raise ConfigError(
            "atomic=True copies the new values into the model, and transfer='mmap' is there to copy none",
            hint="choose one of them",
        )
    found = resolve_loader(source, loader, loader_kwargs or {})
    if atomic:
        return load_aside(model, lambda copied: load_from(copied, source, found, context))
    return load_from(model, source, found, context)


def load_model(model: nn.Module, source: Any, **options: Any) -> nn.Module:
    """Fill any module in place, switch it to evaluation, and return it. Takes what `load_into` takes."""
    load_into(model, source, **options)
    return model.eval()


def from_pretrained(
    source: str | Path | None,
    *,
    weights: Any = None,
    loader: Any = "auto",
    loader_kwargs: Mapping[str, Any] | None = None,
    config: Any = None,
    auto_class: Any = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    device_map: DeviceOption = None,
    rules: Any = None,
    on_missing: PolicyOption = "error",
    on_unexpected: PolicyOption = "warn",
    on_mismatch: PolicyOption = "error",
    progress: ProgressOption = None,
    verify: VerifyOption | None = None,
    automatic: bool = True,
    transfer: TransferOption = "direct",
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> tuple[nn.Module, LoadReport]:
    """Build a transformers model from its config and fill it through any loader.

    Args:
        source: A folder or hub id with a config.
        weights: Where the weights lie, if not with the config; or weights themselves.
        loader: See `load_into`.
        loader_kwargs: Its options.
        config: A config, or where to find one, instead of the source's.
        auto_class: The class to build; default: what the config names.
        dtype: The parameters' dtype; ``"auto"``: the config's, else the stored one.
        device: Where the model is to be.
        device_map: The same for a model over several devices, as transformers takes it: a dict of module names (``""``
            for all the rest) to devices, of which the longest that fits counts; or ``"auto"``, ``"balanced"``,
            ``"balanced_low_0"`` or ``"sequential"``, and transformers finds one by the memory there is. Needs
            accelerate, whose hooks move data between the devices.
        rules: See `load_into`; so are the policies, ``progress`` and ``verify``.
        on_missing: See `load_into`.
        on_unexpected: See `load_into`.
        on_mismatch: See `load_into`.
        progress: See `load_into`.
        verify: See `load_into`.
        automatic: See `plan_load`.
        transfer: See `load_into`.
        trust_remote_code: Whether code that comes with the model may run.
        **model_kwargs: For the config, and for the model's constructor. ``quantization_config``, a mapping or one of
            transformers' objects, says what is to differ from the config's own for a quantised checkpoint, e.g.
            ``{"dequantize": True}``. ``revision``, ``cache_dir``, ``token``,
            ``subfolder`` and ``local_files_only`` say where on the hub the config is; for weights in the same
            repository the loader's own options count as well.

    Returns:
        The model, in evaluation mode, and the report.

    Raises:
        ConfigError: If an argument is not allowed; nothing was opened. Or if ``device_map`` says nothing of a
            parameter, or puts one that is tied on two devices; nothing was touched.
        ModelError: If the model can't be built.
        PlanError: If the weights don't fit it.
    """
    context = load_context(
        rules, on_missing, on_unexpected, on_mismatch, device, progress, verify, automatic, transfer, device_map
    )
    for said, name in (("weight_loader", "loader"), ("weight_loader_kwargs", "loader_kwargs")):
        if said in model_kwargs:
            raise ConfigError(f"from_pretrained has no argument {said!r}, which is LLM's; here it is {name!r}")
    prepared = prepare(
        source,
        context,
        weights=weights,
        loader=loader,
        loader_kwargs=loader_kwargs,
        config=config,
        auto_class=auto_class,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **model_kwargs,
    )
    return prepared.model, prepared.fill()


def save_weights(
    model: nn.Module,
    path: str | Path,
    *,
    layout: Layout = "model",
    max_shard_size: int | str = "5GB",
    dtype: Literal["stored"] | None = None,
    on_missing: PolicyOption = "error",
    like: Any = None,
    rules: Any = None,
    loader: Any = "auto",
    loader_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Path, ...]:
    """Write a model's parameters and persistent buffers as safetensors, atomically.

    In its own layout everything has the model's names, and what is tied is written once. In the checkpoint's, each
    tensor has the name and shape that it had when the model was loaded: what was fused is taken apart, what was
    transposed is turned back. Before anything is written it is proved that each element is at hand exactly once.

    Args:
        model: The model.
        path: A folder (``model.safetensors``, or shards with an index), or a file that ends in ``.safetensors``. It
            may be what the model was loaded from.
        layout: ``"model"`` or ``"checkpoint"``.
        max_shard_size: Bytes a shard, as a number or like ``"5GB"``.
        dtype: ``"stored"``: the dtype that each tensor had in the checkpoint. Default: the model's own.
        on_missing: What is done about tensors of the checkpoint whose values are not in the model, for they were
            dropped, not taken or computed with: ``"error"``; ``"warn"`` or ``"ignore"`` leave them out; or a dict of
            name pattern -> one of these. What is computed rather than learnt is left out with a warning.
        like: The checkpoint whose layout is wanted, if not the one that the model was last loaded from: a source, of
            which only the headers are read, or weights themselves.
        rules: The rules by which it would be loaded.
        loader: Who opens it.
        loader_kwargs: Options for that.

    Returns:
        The files written.

    Raises:
        HalfLoadedModelError: If the last load into the model failed on the way.
        ModelError: If the model is none; or from within a load into it. One of another thread is waited for.
        ConfigError: If the size is none, or the arguments don't go together.
        PlanError: If the other checkpoint does not fit the model.
        SaveError: If something can't be written, or somebody else is saving there; what was there before stays.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is an nn.Module that was made, not {_a(model)}")
    given: Any = path  # Users are not held to types.
    if not isinstance(given, str | Path) or given == "":
        raise SaveError(f"weights are saved to a str or a Path, not {_a(given)}", hint='e.g. "./folder"')
    shard_size = parse_size(max_shard_size)
    with usable(model):
        policies = Policies(missing=on_missing)
        infos: Sequence[Described]
        if layout == "checkpoint" and dtype in (None, "stored"):
            origin = _origin(model, like, rules, loader, loader_kwargs)
            infos, tensor = checkpoint_layout(model, origin, policies, stored_dtype=dtype == "stored")
        elif layout == "model" and dtype is like is rules is None:
            infos, tensor = _own_layout(model)
        else:
            raise ConfigError(
                f"layout={layout!r} with dtype={dtype!r} can't be",
                hint="a layout is 'model' or 'checkpoint'; only the latter takes dtype='stored', like= and rules=",
            )
        path = Path(path)
        metadata = {"format": "pt"}
        if path.suffix == ".safetensors":
            write_safetensors(path, infos, tensor, metadata)
            return (path,)
        return write_sharded(path, infos, tensor, max_shard_size=shard_size, metadata=metadata)


def _own_layout(model: nn.Module) -> tuple[list[Described], Callable[[str], torch.Tensor]]:
    targets = Targets(model)
    # Safetensors refuses two names for one memory, and who reads the file ties them again.
    kept = [target for name, target in targets.by_name.items() if targets.canonical[name] == name]
    tensors = {target.name: target.tensor.detach() for target in kept}
    infos: list[Described] = [_Described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return infos, tensors.__getitem__


def _origin(model: nn.Module, like: Any, rules: Any, loader: Any, loader_kwargs: Mapping[str, Any] | None) -> Origin:
    """What a model was loaded from, or would be."""
    if like is None:
        if rules is not None:
            raise ConfigError("rules lead from a checkpoint's names, so like=<that checkpoint> goes with them")
        origin = load_origin(model)
        if origin is None:
            raise SaveError(
                "it is not known how this model was made of its checkpoint: it was not loaded here as a whole, or by "
                "code of its own",
                hint="name a checkpoint of that layout: like=<folder, file or hub id>, and the rules by which it loads",
            )
        return origin
    context = load_context(rules)
    opened = isinstance(like, str | Path)
    weights = open_weights(like, loader, **(loader_kwargs or {})) if opened else as_catalogue(like)
    try:
        plan = make_plan(model, weights, context)
        plan.raise_if_errors()
        return origin_of(plan, weights.infos(), Targets(model))
    finally:
        if opened:
            weights.close()


def safetensors_weights_iterator(
    folder: str | Path, *, progress: ProgressOption = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` one at a time, by the same file selection and checks as the ``local`` loader.

    The next ones are read ahead, in the order of the files. A tensor that was yielded belongs to whoever got it.

    Args:
        folder: A folder with safetensors files, or one file.
        progress: As for `load_into`; True shows a bar.

    Raises:
        SourceNotFoundError: If there are none (it is also a FileNotFoundError).
    """
    weights = open_weights(folder, "local")
    return streamed(weights, progress)


def streamed(weights: Weights, progress: ProgressOption) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of weights, the next ones read ahead, in the order of the files; then the weights are closed."""
    from weightloaders.progress import Progress
    from weightloaders.transfer.engine import ProgressEvent
    from weightloaders.transfer.read_ahead import ReadAhead

    total, done = weights.nbytes, 0
    ahead = ReadAhead(weights.infos(), lambda info: weights[info.name], TransferOptions())
    with weights, Progress(progress) as shown, contextlib.closing(iter(ahead)) as tensors:
        for info, tensor in tensors:
            done += tensor.nbytes
            yield info.name, tensor
            # What is let go of gives its memory to the next.
            del tensor
            shown(ProgressEvent(done, total))


# ------------------------------------------------------------------ helpers


class _Described:
    """A tensor to be written: name, dtype and shape."""

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape


def _a(value: Any) -> str:
    """What somebody gave instead of what was asked for."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{brief(value)} ({type(value).__name__})"
