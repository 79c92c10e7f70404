"""A transformers model without weights: built on meta from its config, and finalised once the weights are in.

What comes out equals what transformers' own ``from_pretrained`` builds, to the bit. Some of the pieces it takes are not
public in transformers (verified with 5.24); where one is not there, the model is built on the CPU the public way.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.discovery import did_you_mean
from weightloaders.errors import ConfigError, ModelError, SourceNotFoundError, WeightLoadersError
from weightloaders.loaders.hub import HubAccess
from weightloaders.loaders.place import as_name, looks_like_repository
from weightloaders.loaders.resolve import fetch_model_files, resolve_folder
from weightloaders.mapping.dtypes import is_codes
from weightloaders.mapping.transformers import tied_names
from weightloaders.quantizers import apply_to, complete, quantisation_for, refusal
from weightloaders.registry import WeightLoaderRegistry
from weightloaders.transfer.device_map import CPU, DeviceMap
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import ADAPTER_FILE, ADAPTER_HINT, PARAMS_FILE
from weightloaders.weights.folder import kind_of
from weightloaders.weights.http import is_web_address
from weightloaders.weights.texts import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from weightloaders.loaders.base import BaseWeightLoader
    from weightloaders.mapping.quantised import Quantisation
    from weightloaders.weights.weights import Weights

logger = logging.getLogger(__name__)

_CODE = "look at the code that lies with it, and pass trust_remote_code=True if it may run"
_NO_CONFIG = "give config=<folder or config object>, or name a folder that has a config.json"
_OF_META = "it is in Meta's layout: name the loader 'meta' (pip install weightloaders-meta), which makes a config of it"
# Options of the hub, and of the web, that find a config as well as weights.
HUB_OPTIONS = ("revision", "cache_dir", "token", "subfolder", "local_files_only", "headers")
# What `from_pretrained` and `LLM` take by name; what they don't goes to the model, which then is asked for odd things.
ARGUMENTS = (
    *HUB_OPTIONS, "auto_class", "automatic", "config", "device", "device_map", "dtype", "engine", "loader",
    "loader_kwargs", "max_model_len", "max_num_seqs", "on_mismatch", "on_missing", "on_unexpected", "progress",
    "quantization_config", "rules", "sampling_params", "tokenizer", "transfer", "trust_remote_code", "verify",
    "weight_loader", "weight_loader_kwargs", "weights",
)  # fmt: skip


# Beside these, code of the model's own, where that is trusted.
_BUILT_FROM = ("config.json", "generation_config.json")
# The largest configs, with their lists of labels, have some megabytes.
_MAX_CONFIG_BYTES = 1 << 26

# Told of a folder, and of the patterns of the files in it that are about to be read, or run; may refuse.
Admit = Callable[[Path, Sequence[str]], object]


def _admit_all(folder: Path, patterns: Sequence[str]) -> None:
    pass


@dataclass(slots=True)
class Skeleton:
    """A model to be filled.

    Attributes:
        model: The model, on meta (or on the CPU where it could not be built on meta).
        dtypes: The dtype of parameters where it differs from what the model has now.
        quantisation: How it takes a quantised checkpoint, where its config describes one.
    """

    model: nn.Module
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    quantisation: Quantisation | None = None

    def finalise(self, filled: Iterable[str]) -> list[str]:
        """Tie what the config ties, once the weights are in, and switch to evaluation.

        Returns:
            What is worth a warning: parameters that the config ties, while the weights have different values for them.
        """
        model: Any = self.model
        missing = {name for name, _ in _named(model)} - set(filled)
        ties = tied_names(model)
        if ties:
            model.tie_weights(missing_keys=missing, recompute_mapping=False)
        model.eval()
        now = dict(_named(model))
        warnings = [] if self.quantisation is None else complete(model, self.quantisation)
        return warnings + [
            f"the config ties {name} to {other}, but the source has different values for them; both are kept"
            for name, other in ties.items()
            if name in now and other in now and now[name] is not now[other]
        ]


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def model_files(
    source: str | Path,
    hub_options: Mapping[str, Any] | None = None,
    needed: str = "",
    loader: BaseWeightLoader | None = None,
) -> Path:
    """The folder with a model's config, tokenizer and the like; downloaded, if the source is on the hub.

    Args:
        source: A folder or hub id.
        hub_options: Those of `HUB_OPTIONS`.
        needed: The file without which the others are of no use.
        loader: Who reads the weights that lie there; it may be the only one who knows how to get at other files.

    Raises:
        SourceError: If there is no such folder or repository, or nothing of the kind in it.
    """
    name = as_name(source)
    # Of other places than folders, the hub and the web only their loaders know anything.
    if loader is None and _is_strange(name):
        loader = WeightLoaderRegistry.resolve("auto", source=name)
    found = None if loader is None else loader.get_model_files(name, needed)
    if found is not None:
        return found if isinstance(found, Path) else fetch_model_files(found, needed=needed)
    options = {key: value for key, value in (hub_options or {}).items() if key in HUB_OPTIONS and value is not None}
    subfolder, headers = options.pop("subfolder", ""), options.pop("headers", None)
    return resolve_folder(source, access=HubAccess(**options), subfolder=subfolder, needed=needed, headers=headers)


def _is_strange(name: str) -> bool:
    return "://" in name and not is_web_address(name) and not looks_like_repository(name)


def build_skeleton(
    source: str | None,
    *,
    config: Any = None,
    auto_class: Any = None,
    dtype: torch.dtype | str = "auto",
    stored_dtype: Callable[[], torch.dtype | None] | None = None,
    hub_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    devices: DeviceMap = CPU,
    loader: BaseWeightLoader | None = None,
    admit: Admit = _admit_all,
    **model_kwargs: Any,
) -> Skeleton:
    """Build a transformers model from its config, without weights.

    Args:
        source: A folder or hub id with a config.
        config: A config object, or where to find one, instead of the source's.
        auto_class: The class to build: a model class, an ``AutoModelFor...`` class, or the name of either. Default: the
            first of the config's ``architectures``.
        dtype: The parameters' dtype; ``"auto"``: the config's, else that of the stored weights, else float32.
        stored_dtype: Tells the dtype of the stored weights; asked only if it is needed.
        hub_options: ``revision``, ``cache_dir``, ``token``, ``subfolder``, ``local_files_only``.
        trust_remote_code: Whether code that comes with the model may run.
        quantization_config: What is to differ from the config's own; see `quantisation_for`.
        devices: Where the model is to be; transformers' quantizers ask for that.
        loader: Who reads the weights that lie with the config, if they do.
        admit: Told of a folder, and of the patterns of the files in it that are about to be read, or run; may refuse.
        **model_kwargs: For the config, and for the model's constructor.

    Raises:
        ConfigError: If torch has no such dtype, or transformers no such class; before a config is looked for.
        ModelError: If there is no usable config, transformers does not know its architecture, or it can't load a
            checkpoint that is quantised in this way here.
    """
    if not isinstance(trust_remote_code, bool):
        # "no" would be a yes.
        raise ConfigError(f"trust_remote_code is True or False, not {brief(trust_remote_code)}")
    wanted = _dtype_named(dtype)
    auto_class = _class_named(auto_class)
    # A config given as an object needs no files; a source may then be a place that only the loader understands.
    folder = None if source is None or config is not None else _files_or_explain(source, hub_options, loader)
    config, model_kwargs = _config(folder, config, hub_options, trust_remote_code, model_kwargs, admit)
    model_class = _model_class(config, auto_class, folder, trust_remote_code)
    config = copy.deepcopy(config)
    quantisation = quantisation_for(config, quantization_config, devices, source or "the model")
    dtype = wanted or _own_dtype(config, stored_dtype)
    if quantisation is not None:
        changed: torch.dtype = quantisation.quantizer.update_dtype(dtype)
        dtype = changed
    # The config is saved with the model, and then says what it is loaded as.
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.dtype = dtype
    model = _on_meta(model_class, config, dtype, model_kwargs, quantisation)
    _add_generation_config(model, folder)
    return Skeleton(model, _kept_dtypes(model, dtype), quantisation)


def _files_or_explain(
    source: str, hub_options: Mapping[str, Any] | None, loader: BaseWeightLoader | None = None
) -> Path:
    try:
        return model_files(source, hub_options, "config.json", loader)
    except SourceNotFoundError as error:
        where = shown(source)
        # `Path.is_file` fails for a name that is too long.
        if os.path.isfile(Path(source) / ADAPTER_FILE):  # noqa: PTH113
            raise ModelError(
                f"{where} holds an adapter (LoRA or the like), which is no model by itself",
                file=where,
                hint=ADAPTER_HINT,
            ) from error
        is_metas = os.path.isfile(Path(source) / PARAMS_FILE)  # noqa: PTH113
        raise ModelError(
            f"there is no config in {where}: {error.message}",
            file=where,
            hint=_OF_META if is_metas else error.hint or _NO_CONFIG,
        ) from error


def _config(
    folder: Path | None,
    config: Any,
    hub_options: Mapping[str, Any] | None,
    trust: bool,
    kwargs: dict[str, Any],
    admit: Admit,
) -> tuple[Any, dict[str, Any]]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    kwargs = dict(kwargs)
    attention = kwargs.pop("attn_implementation", None)
    if not isinstance(config, PreTrainedConfig):
        if config is not None:
            folder = _files_or_explain(str(config), hub_options)
        if folder is None:
            raise ModelError("neither a source nor a config was given", hint=_NO_CONFIG)
        admit(folder, (*_BUILT_FROM, "*.py") if trust else _BUILT_FROM)
        _check_sizes(folder)
        try:
            config, kwargs = AutoConfig.from_pretrained(
                folder, return_unused_kwargs=True, trust_remote_code=trust, local_files_only=True, **kwargs
            )
        except Exception as error:
            # Whatever stands in the file, or was given, meets the code of a config's class as it is.
            said = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else _first_line(error)
            at_fault = next((name for name in kwargs if repr(name) in said), None)
            if at_fault is not None:
                raise ModelError(f"{at_fault}={brief(kwargs[at_fault])} does not suit the config: {said}") from error
            hint = _NO_CONFIG if trust or "trust_remote_code" not in str(error) else _CODE
            raise ModelError(f"there is no usable config in {folder}: {said}", file=folder, hint=hint) from error
        kwargs.pop("local_files_only", None)
    if attention is not None:
        config._attn_implementation = attention  # noqa: SLF001 -- what `from_pretrained` sets for this argument
    return config, kwargs


def _check_sizes(folder: Path) -> None:
    for name in _BUILT_FROM:
        file = folder / name
        if kind_of(file) is None and file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError(
                f"{file} has {file.stat().st_size} bytes, which no config has (limit {_MAX_CONFIG_BYTES})",
                file=file,
                hint=_NO_CONFIG,
            )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _model_class(config: Any, auto_class: Any, folder: Path | None, trust: bool) -> Any:
    import transformers

    wanted = auto_class
    if wanted is None:
        names = getattr(config, "architectures", None) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(
                f"the config of {folder or 'the model'} has no list of names as architectures: {names!r:.100}",
                hint="say which class to build, e.g. auto_class='AutoModelForCausalLM'",
            )
        if not names:
            raise ModelError(
                f"the config of {folder or 'the model'} names no architecture",
                hint="say which class to build, e.g. auto_class='AutoModelForCausalLM'",
            )
        if trust and getattr(config, "auto_map", None):
            return _remote_class(config, folder)
        wanted = getattr(transformers, names[0], None)
        if not isinstance(wanted, type):
            raise ModelError(
                f"transformers {transformers.__version__} has no class {names[0]!r}",
                hint="a newer transformers may have it; code that comes with a model needs trust_remote_code=True",
            )
    mapping = getattr(wanted, "_model_mapping", None)
    if mapping is None:
        return wanted
    try:
        found = mapping[type(config)]
    except KeyError as error:
        raise ModelError(f"{wanted.__name__} has no model for a {type(config).__name__}") from error
    return found[0] if isinstance(found, tuple | list) else found


def _remote_class(config: Any, folder: Path | None) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    references = {k: v for k, v in config.auto_map.items() if k.startswith("AutoModel")}
    preferred = next(
        (k for k in ("AutoModelForCausalLM", "AutoModel") if k in references), next(iter(references), None)
    )
    if preferred is None:
        raise ModelError(f"the config of {folder} brings code, but none for a model: {config.auto_map}")
    return get_class_from_dynamic_module(references[preferred], str(folder or config.name_or_path))


def _class_named(auto_class: Any) -> Any:
    import transformers

    if auto_class is None or isinstance(auto_class, type):
        return auto_class
    if not isinstance(auto_class, str):
        raise ConfigError(f"auto_class is a class of transformers or the name of one, not {auto_class!r}")
    found = getattr(transformers, auto_class, None)
    if found is None:
        near = did_you_mean(auto_class, (name for name in dir(transformers) if name.startswith("AutoModel")))
        raise ConfigError(f"transformers {transformers.__version__} has no class {auto_class!r}{near}")
    return found


def _dtype_named(dtype: torch.dtype | str) -> torch.dtype | None:
    """The dtype; None for ``"auto"``."""
    if dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        near = did_you_mean(dtype, known) if isinstance(dtype, str) and found is None else ""
        raise ConfigError(
            f"a model's dtype is 'auto' or a floating-point dtype of torch's, not {dtype!r}{near}",
            hint="e.g. 'bfloat16', 'float16' or 'float32'",
        )
    return found


def _own_dtype(config: Any, stored: Callable[[], torch.dtype | None] | None) -> torch.dtype:
    """The config's dtype, else that of the stored weights."""
    declared = getattr(config, "dtype", None)
    if isinstance(declared, str):
        declared = getattr(torch, declared, None)
    dtype = declared or (stored() if stored is not None else None) or torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"the config says that the model's dtype is {dtype!r}", hint="say which: dtype='float32'")
    return dtype


def _on_meta(
    model_class: Any, config: Any, dtype: torch.dtype, kwargs: dict[str, Any], quantisation: Quantisation | None = None
) -> nn.Module:
    import transformers

    try:
        contexts = model_class.get_init_context(dtype, quantisation is not None, False, False)
    except (AttributeError, TypeError) as error:
        if quantisation is not None:
            raise refusal(quantisation.quantizer, error) from error
        logger.warning(
            "transformers %s builds models in another way than the versions that were tested; the model is built on "
            "the CPU, with values that the weights then replace, which takes longer",
            transformers.__version__,
        )
        # What the public AutoModel.from_config forwards to.
        built: nn.Module = _constructed(lambda: model_class._from_config(config, dtype=dtype, **kwargs), model_class)  # noqa: SLF001
        tensors = dict(_named(built))
        for name, kept in _kept_dtypes(built, dtype).items():
            tensors[name].data = tensors[name].data.to(kept)
        return built
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        model: nn.Module = _constructed(lambda: model_class(config, **kwargs), model_class)
        if quantisation is not None:
            apply_to(model, quantisation, dtype)
    return model


def _constructed(build: Callable[[], Any], model_class: Any) -> Any:
    try:
        return build()
    except TypeError as error:
        odd = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if odd is None:
            raise _not_built(model_class, error) from error
        # Whatever nobody else knows is handed on to the model: so a slip of the pen ends here.
        raise ModelError(
            f"{model_class.__name__} takes no argument {odd[1]!r}{did_you_mean(odd[1], ARGUMENTS)}",
            hint="arguments that loading and the config don't know go to the model's constructor; leave it out, or "
            "correct its name",
        ) from error
    except WeightLoadersError:
        raise
    except Exception as error:
        raise _not_built(model_class, error) from error


def _not_built(model_class: Any, error: Exception) -> ModelError:
    return ModelError(
        f"{model_class.__name__} can't be built from this config: {type(error).__name__}: {_first_line(error)}"
    )


def _kept_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameters that stay float32 whatever the model's dtype is."""
    if not hasattr(model, "_get_dtype_plan"):
        return {}
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # noqa: SLF001 -- transformers' own list of them
    patterns = [(re.compile(pattern.replace("*", ".*")), kept) for pattern, kept in plan.items()]
    kept_dtypes = {}
    for name, tensor in _named(model):
        kept = next((kept for pattern, kept in patterns if pattern.search(name)), None)
        if kept is not None and not is_codes(tensor.dtype):
            kept_dtypes[name] = kept
    return kept_dtypes


def _add_generation_config(model: Any, folder: Path | None) -> None:
    """``generation_config.json`` is a file of its own, which the constructor does not read."""
    if folder is None or not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except Exception as error:
            file = folder / "generation_config.json"
            raise ModelError(
                f"{file} can't be used: {type(error).__name__}: {_first_line(error)}",
                file=file,
                hint="correct it, or remove it: a model can do without",
            ) from error


def stored_dtype_of(weights: Weights) -> torch.dtype | None:
    """The dtype of the first floating-point tensor of a catalogue by name; 8-bit codes don't count.

    A safetensors file begins with the widest dtype, which in a quantised checkpoint is that of the scales.
    """
    plain = (info for info in weights.infos() if not is_codes(info.dtype))
    return min(((info.name, info.dtype) for info in plain), key=lambda found: found[0], default=("", None))[1]
