"""What vLLM's reload in place has come to: it takes a model apart, layer by layer, and puts it together again.

See vLLM's ``vllm/model_executor/model_loader/reload/layerwise.py``: of a layer to which nothing was written it warns,
and what a reload that failed leaves behind the next one would go on with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise

from weightloaders.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

_SHOWN = 8


def put_back(model: nn.Module) -> None:
    """Give the layers that a failed reload left in pieces the values back that they had before it."""
    for _, layer, info in _in_pieces(model):
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 -- vLLM does it itself for layers without weights
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def check_written(model: nn.Module, loaded: Collection[str]) -> None:
    """Refuse a reload, at its end, that wrote nothing to a layer that the first load had filled.

    Args:
        model: The model, still in pieces.
        loaded: The parameters that the first load had filled.

    Raises:
        LoadError: With the parameters.
    """
    pieces = {layer: (prefix, info) for prefix, layer, info in _in_pieces(model)}
    left: dict[str, nn.Parameter] = {}
    # What is tied gets its values through one of its layers, and vLLM puts the same memory back into the others.
    written: set[int] = set()
    for layer in model.modules():
        prefix, info = pieces.get(layer, ("", None))
        if info is None:
            written.update(parameter.data_ptr() for parameter in layer.parameters(recurse=False))
        elif info.kernel_tensors and info.load_numel_total and not is_deferred_attention_layer(layer):
            before = info.kernel_tensors[0]
            if info.load_numel:
                written.update(parameter.data_ptr() for parameter in before.values())
            else:
                left.update((f"{prefix}.{name}" if prefix else name, before[name]) for name in before)
    names = [name for name, parameter in left.items() if name in loaded and parameter.data_ptr() not in written]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise LoadError(
            f"the reload wrote nothing to {', '.join(map(repr, names[:_SHOWN]))}{more}", tensor=names[0],
            hint="reload from a checkpoint that has all that the model was loaded from",
        )  # fmt: skip


def _in_pieces(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    for prefix, layer in model.named_modules():
        info = layerwise.LAYERWISE_INFO.get(layer)
        if info is not None and info.can_load():
            yield prefix, layer, info
