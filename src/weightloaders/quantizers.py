"""transformers' quantizer for a model: chosen by its config, applied to its skeleton, and once more when it is filled.

What of it the plan needs is in `weightloaders.mapping.quantised`. These pieces of transformers are not public
(``quantizers.auto``, ``HfQuantizer``; there since 5.21, verified with 5.24); where one is not there, a quantised model
is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightloaders.discovery import did_you_mean
from weightloaders.errors import ConfigError, ModelError, summary
from weightloaders.mapping.quantised import Quantisation, method_of, remember, told

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weightloaders.transfer.device_map import DeviceMap

_DEQUANTISE = {"dequantize": True}
_IF_PLAIN = "if its weights are plain after all, remove quantization_config from the config"
_UNNAMED = "a method that its config does not name"


def quantisation_for(config: Any, wanted: Any, devices: DeviceMap, source: str) -> Quantisation | None:
    """How a model of this config takes a quantised checkpoint, as transformers' own ``from_pretrained`` would choose.

    Args:
        config: The model's; changed as transformers changes it.
        wanted: The caller's ``quantization_config``: an object of transformers, or a mapping of options that differ.
        devices: Where the model is to be.
        source: What the config is of, for messages.

    Returns:
        None where the checkpoint is plain.

    Raises:
        ConfigError: If what the caller gave is no ``quantization_config``.
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
    method = method_of(declared)
    if wanted is not None and not isinstance(wanted, Mapping) and not hasattr(wanted, "quant_method"):
        raise ConfigError(
            f"quantization_config is one of transformers' configs or a mapping, not {wanted!r}",
            hint=f"e.g. {_DEQUANTISE}",
        )
    try:
        from transformers.quantizers.auto import AutoQuantizationConfig, get_hf_quantizer

        declared = dict(declared if isinstance(declared, Mapping) else declared.to_dict())
        if isinstance(wanted, Mapping):
            _check_options(AutoQuantizationConfig.from_dict(declared), wanted)
            declared, wanted = {**declared, **wanted}, None
        config.quantization_config = declared
        asked = any(told(options, "dequantize") for options in (declared, wanted))
        placed = devices.strategy or devices.entries
        quantizer, _, _ = get_hf_quantizer(config, wanted, placed, weights_only=True, user_agent={})
    except ConfigError:
        raise
    except Exception as error:
        quantizer = _unchecked(declared, wanted)
        raise refusal(quantizer, error, method, source) from error
    if quantizer is None:
        raise ModelError(
            f"{source} is quantised with {method or _UNNAMED}, which this version of transformers does not know",
            hint=_IF_PLAIN,
        )
    return Quantisation(quantizer, asked=asked)


def apply_to(model: nn.Module, quantisation: Quantisation, dtype: torch.dtype) -> None:
    """Replace modules of a model on meta, as transformers does before it loads.

    Raises:
        ModelError: If transformers can't do that here, or puts the parameters together by code of its own.
    """
    quantizer = quantisation.quantizer
    try:
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, use_kernels=False)
        operations = quantizer.get_load_operations()
    except Exception as error:
        raise refusal(quantizer, error) from error
    if not quantisation.dequantises and "deserialize" in operations:
        raise ModelError(
            f"weights quantised with {quantisation.method} are put together by code of transformers, one module at a "
            "time, and that can't be planned",
            hint=_way_out(quantizer) or "load this model with transformers' own from_pretrained",
        )
    remember(model, quantisation)


def complete(model: Any, quantisation: Quantisation) -> list[str]:
    """Complete a model whose weights are in, as transformers does.

    Returns:
        What is worth a warning.

    Raises:
        ModelError: If transformers can't.
    """
    model.hf_quantizer = quantisation.quantizer
    # By these transformers' own save_pretrained finds back to the checkpoint's names and shapes.
    model._weight_conversions = [t for t in quantisation.transforms if t.was_used()]  # noqa: SLF001 -- see above
    try:
        quantisation.quantizer.postprocess_model(model)
    except Exception as error:
        raise refusal(quantisation.quantizer, error) from error
    if not quantisation.dequantises:
        return []
    what = f"weights quantised with {quantisation.method}"
    if not quantisation.met_codes:
        plain = "the source's are plain and were taken as they are; remove quantization_config from the config"
        return [f"the config describes {what}, but {plain}"]
    if quantisation.asked:
        return []
    dtype = str(model.dtype).removeprefix("torch.")
    why = f"transformers can't run them as they are here; quantization_config={_DEQUANTISE} asks for that"
    return [f"{what} were de-quantised to {dtype}, for {why}"]


def _declared(config: Any) -> Any:
    """What a config says of the checkpoint's quantisation; None if it says nothing."""
    declared = getattr(config, "quantization_config", None)
    if declared is None and hasattr(config, "get_text_config"):
        declared = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if declared is not None and not isinstance(declared, Mapping) and not hasattr(declared, "to_dict"):
        raise ModelError(f"the config's quantization_config is no mapping, but {declared!r:.100}", hint=_IF_PLAIN)
    return declared


def _check_options(config: Any, options: Mapping[str, Any]) -> None:
    """Refuse what is no option of a checkpoint's own config of transformers."""
    known = sorted(name for name in vars(config) if not name.startswith("_"))
    for name in options:
        if name not in known:
            near = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"quantization_config of a checkpoint in {method_of(config)} has no {name!r}{near}")


def _unchecked(declared: Any, wanted: Any) -> Any:
    """The same quantizer without its look at the machine; None if there is none."""
    try:
        from transformers.quantizers.auto import AutoHfQuantizer

        merged = AutoHfQuantizer.merge_quantization_configs(copy.deepcopy(declared), wanted)
        return AutoHfQuantizer.from_config(merged, pre_quantized=True)
    except Exception:  # noqa: BLE001 -- it is asked for a hint only; the error that led here is the one to be told
        return None


def refusal(quantizer: Any, error: Exception, method: str = "", source: str = "the checkpoint") -> ModelError:
    """What transformers says of a quantised checkpoint that it can't load here, as an error of ours.

    Args:
        quantizer: transformers' own; None if it could not be made.
        error: What it said.
        method: The method, if the quantizer can't tell.
        source: Whose checkpoint it is, for the message.
    """
    method = method or method_of(getattr(quantizer, "quantization_config", None))
    hint = _way_out(quantizer) if method else _IF_PLAIN
    return ModelError(
        f"{source} is quantised with {method or _UNNAMED}, and transformers can't load that here: {summary(error)}",
        hint=hint or "install what it names; or convert the checkpoint to plain weights first",
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
