"""Quantised checkpoints of transformers' models: its quantizer for a model, and what of a checkpoint belongs together.

The quantizers are in pieces of transformers that are not public (``quantizers.auto``, ``HfQuantizer``; verified with
5.24). A quantizer replaces modules before the load (a linear layer by one with codes and scales), or has the codes
multiplied by their scales on the way (it *de-quantises*), and completes the model afterwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from weightloaders.errors import CheckpointFormatError, IncompleteCheckpointError, ModelError, summary
from weightloaders.mapping.dtypes import is_codes

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    import torch
    from torch import nn


_DEQUANTISE = {"dequantize": True}


class Quantisation:
    """How a model takes a quantised checkpoint.

    Args:
        quantizer: transformers' own for the checkpoint's method.
        unasked: Whether de-quantising, if it does that, was decided by transformers and asked for by nobody.

    Attributes:
        quantizer: See above.
        transforms: transformers' renames and conversions of the last plan.
        met_codes: Whether a plan has met any codes.
    """

    def __init__(self, quantizer: Any, *, unasked: bool = False) -> None:
        self.quantizer = quantizer
        self.transforms: list[Any] = []
        self.met_codes = False
        self._unasked = unasked

    @property
    def method(self) -> str:
        """The method, as transformers calls it, e.g. ``fp8``."""
        return _method_of(self.quantizer.quantization_config)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the model is built in, where another was asked for."""
        changed: torch.dtype = self.quantizer.update_dtype(dtype)
        return changed

    @property
    def dequantises(self) -> bool:
        """Whether the model has plain weights in the end."""
        return bool(getattr(self.quantizer.quantization_config, "dequantize", False))

    def prepare(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replace modules of a model on meta, as transformers does before it loads.

        Raises:
            ModelError: If transformers can't do that here, or puts the parameters together by code of its own.
        """
        try:
            self.quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, use_kernels=False)
            operations = self.quantizer.get_load_operations()
        except Exception as error:
            raise refusal(self.quantizer, error) from error
        if not self.dequantises and "deserialize" in operations:
            raise ModelError(
                f"weights quantised with {self.method} are put together by code of transformers, one module at a time, "
                "and that can't be planned",
                hint=_way_out(self.quantizer) or "load this model with transformers' own from_pretrained",
            )
        _of_model[model] = self

    def finish(self, model: Any) -> list[str]:
        """Complete a model whose weights are in, as transformers does.

        Returns:
            What is worth a warning.
        """
        model.hf_quantizer = self.quantizer
        # By these transformers' own save_pretrained finds back to the checkpoint's names and shapes.
        model._weight_conversions = [t for t in self.transforms if t.was_used()]  # noqa: SLF001 -- see above
        self.quantizer.postprocess_model(model)
        if not self.dequantises:
            return []
        what = f"weights quantised with {self.method}"
        if not self.met_codes:
            plain = "the source's are plain and were taken as they are; remove quantization_config from the config"
            return [f"the config describes {what}, but {plain}"]
        if not self._unasked:
            return []
        dtype = str(model.dtype).removeprefix("torch.")
        why = f"transformers can't run them as they are here; quantization_config={_DEQUANTISE} asks for that"
        return [f"{what} were de-quantised to {dtype}, for {why}"]

    # -- what belongs together

    def loads(self, converter: Any) -> bool:
        """Whether a conversion of transformers takes codes with their scales: what it gets is not to be cast before."""
        return any(getattr(operation, "hf_quantizer", None) is not None for operation in converter.operations)

    def has_codes(self, slots: Mapping[str, Sequence[torch.Tensor]], names: Mapping[str, str]) -> bool:
        """Whether there are codes to be multiplied among the sources of a conversion, all of them with their scales.

        Args:
            slots: Pattern of a source -> the tensors of that kind.
            names: Pattern of a source -> the name of one of these tensors.

        Raises:
            IncompleteCheckpointError: If there are codes without scales, or scales without codes.
            CheckpointFormatError: If scales are not of the shape that goes with their codes.
        """
        found = False
        for parts in self.quantizer.serialized_names.values():
            if len(parts) < 2:
                continue
            code, scale, *_ = parts
            for stem in dict.fromkeys(p.removesuffix(part) for p in slots for part in parts if p.endswith(part)):
                codes, scales = slots.get(stem + code, ()), slots.get(stem + scale, ())
                if scales and not any(slots.get(stem + part) for part in parts if part != scale):
                    raise self._half(names[stem + scale], scale, code, "the weight that they belong to")
                if not scales and any(is_codes(tensor.dtype) for tensor in codes):
                    raise self._half(names[stem + code], code, scale, "their scales")
                found = found or bool(scales)
                for tensor, its_scales in zip(codes, scales, strict=False):
                    self._check_shapes(tensor, its_scales, names[stem + code], names[stem + scale])
        self.met_codes = self.met_codes or found
        return found

    def _half(self, name: str, part: str, other: str, what: str) -> IncompleteCheckpointError:
        absent = name.removesuffix(part) + other if name.endswith(part) else other
        return IncompleteCheckpointError(
            f"{name!r} is there without {what}, {absent!r}",
            tensor=name,
            hint="the checkpoint is incomplete: fetch or export it again",
        )

    def _check_shapes(self, codes: torch.Tensor, scales: torch.Tensor, name: str, scales_name: str) -> None:
        block = getattr(self.quantizer.quantization_config, "weight_block_size", None)
        if self.method == "mxfp4":
            wanted, how = tuple(codes.shape[:-1]), "one for each block"
        elif block is not None and is_float8(codes.dtype) and codes.dim() > 1:
            grid = [math.ceil(size / by) for size, by in zip(codes.shape[-2:], block, strict=True)]
            wanted, how = (*codes.shape[:-2], *grid), f"one for each block of {' x '.join(map(str, block))}"
        else:
            return
        if tuple(scales.shape) != wanted:
            raise CheckpointFormatError(
                f"{scales_name!r} has the shape {list(scales.shape)}, but {name!r}, of shape {list(codes.shape)}, has "
                f"{list(wanted)} scales, {how}",
                tensor=scales_name,
                hint="the file is of another model, or the config's quantization_config is not this checkpoint's",
            )


_of_model: MutableMapping[Any, Quantisation] = WeakIdKeyDictionary()


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """How a model takes a quantised checkpoint; None for a plain one.

    A model that was de-quantised is plain from then on, but a checkpoint of the same kind can be loaded into it again.
    """
    known = _of_model.get(model)
    if known is None and (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        known = _of_model[model] = Quantisation(quantizer)
    return known


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of the 8-bit floats."""
    return dtype.is_floating_point and dtype.itemsize == 1


# ------------------------------------------------------------------ finding the quantizer


def quantisation_for(config: Any, wanted: Any, device: torch.device | None, source: str) -> Quantisation | None:
    """The quantizer for a config, as transformers' own ``from_pretrained`` would choose it.

    Args:
        config: The model's; changed as transformers changes it.
        wanted: The caller's ``quantization_config``: an object of transformers, or a mapping of options that differ.
        device: Where the model is to be.
        source: What the config is of, for messages.

    Raises:
        ModelError: If transformers does not know the method, or can't use it here.
    """
    declared = _declared(config)
    if declared is None:
        if wanted is not None:
            raise ModelError(
                "quantization_config was given, but by its config the checkpoint is not quantised, and weights are not "
                "quantised while they are loaded",
                hint="load it as it is and quantise the model then, or load it with transformers' own from_pretrained",
            )
        return None
    method = _method_of(declared)
    try:
        from transformers.quantizers.auto import AutoQuantizationConfig, get_hf_quantizer

        if isinstance(wanted, Mapping):
            own = declared if isinstance(declared, Mapping) else declared.to_dict()
            wanted = AutoQuantizationConfig.from_dict({**own, **wanted})
        asked = any(_told(told, "dequantize") for told in (wanted, declared))
        placed = None if device is None else {"": device}
        quantizer, _, _ = get_hf_quantizer(config, wanted, placed, weights_only=True, user_agent={})
    except Exception as error:
        quantizer = _unchecked(declared, wanted)
        raise refusal(quantizer, error, method, source) from error
    if quantizer is None:
        raise ModelError(
            f"{source} is quantised with {method or 'a method that the config does not name'}, which this version of "
            "transformers does not know",
            hint="if its weights are plain after all, remove quantization_config from the config",
        )
    return Quantisation(quantizer, unasked=not asked)


def _declared(config: Any) -> Any:
    """What a config says of the checkpoint's quantisation; None if it says nothing."""
    declared = getattr(config, "quantization_config", None)
    if declared is None and hasattr(config, "get_text_config"):
        declared = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return declared


def _told(declared: Any, key: str) -> Any:
    return declared.get(key) if isinstance(declared, Mapping) else getattr(declared, key, None)


def _method_of(declared: Any) -> str:
    method = _told(declared, "quant_method") or ("bitsandbytes" if _told(declared, "load_in_4bit") else "")
    return str(getattr(method, "value", method))


def _unchecked(declared: Any, wanted: Any) -> Any:
    """The same quantizer without its look at the machine; None if there is none."""
    try:
        from transformers.quantizers.auto import AutoHfQuantizer

        merged = AutoHfQuantizer.merge_quantization_configs(copy.deepcopy(declared), wanted)
        return AutoHfQuantizer.from_config(merged, pre_quantized=True)
    except Exception:  # noqa: BLE001 -- it is asked for a hint only; the error that led here is the one to be told
        return None


def refusal(quantizer: Any, error: Exception, method: str = "", source: str = "the checkpoint") -> ModelError:
    """What transformers says of a quantised checkpoint that it can't load here, as an error of ours."""
    method = method or _method_of(quantizer.quantization_config)
    return ModelError(
        f"{source} is quantised with {method or 'a method that the config does not name'}, and transformers can't load "
        f"that here: {summary(error)}",
        hint=_way_out(quantizer) or "install what it names; or convert the checkpoint to plain weights first",
    )


def _way_out(quantizer: Any) -> str | None:
    """The option that de-quantises, where transformers has one that works here."""
    config: Any = copy.copy(getattr(quantizer, "quantization_config", None))
    if not hasattr(config, "dequantize") or config.dequantize:
        return None
    try:
        config.dequantize = True
        type(quantizer)(config, pre_quantized=True).validate_environment(device_map=None, weights_only=True)
    except Exception:  # noqa: BLE001 -- then it is no way out
        return None
    return f"de-quantise while loading: quantization_config={type(config).__name__}(dequantize=True)"
