"""A model in the layout of the checkpoint that it was loaded from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightloaders.errors import SaveError
from weightloaders.mapping import transformers as hf
from weightloaders.placing import overlaps
from weightloaders.plan import listed
from weightloaders.saving.gathering import gathered, in_memory
from weightloaders.saving.inverting import Written, invert_origin
from weightloaders.saving.own_loaders import with_calls
from weightloaders.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from weightloaders.loading import Origin
    from weightloaders.plan import Policies

_OWN_LAYOUT = "layout='model' writes all that the model has, under its own names"


def checkpoint_layout(
    model: nn.Module, origin: Origin, policies: Policies, *, stored_dtype: bool = False
) -> tuple[list[Written], Callable[[str], torch.Tensor]]:
    """What is to be written, and what puts each tensor together.

    Args:
        model: The model.
        origin: What it was loaded from.
        policies: What is done about the checkpoint's tensors whose values the model has not.
        stored_dtype: Write each in the dtype that the checkpoint had; default: the model's own.

    Raises:
        SaveError: If a tensor can't be put together, and may not be left out; or the model has more.
    """
    targets = Targets(model)
    tensors = {**dict(model.named_buffers(remove_duplicate=False)), **targets.tensors}
    try:
        written = invert_origin(with_calls(origin, tensors), tensors, policies, stored_dtype=stored_dtype)
    except SaveError as error:
        error.hint = f"{error.hint}; {_OWN_LAYOUT}"
        raise
    _check_all_saved(targets, origin)
    for tensor in written:
        for name, _ in tensor.pieces:
            if tensors[name].is_meta:
                raise SaveError(f"{name} is on the meta device and has no values to save", tensor=name)
    by_name, fetch = {tensor.name: tensor for tensor in written}, in_memory(tensors)
    return written, lambda name: gathered(by_name[name], fetch)


def _check_all_saved(targets: Targets, origin: Origin) -> None:
    """Refuse to leave out what the model has and the checkpoint had not."""
    came = {targets.canonical[name] for name in origin.shapes if name in targets.canonical}
    rest = [
        target for name, target in targets.by_name.items()
        if targets.canonical[name] not in came and not targets.is_derived(name)
    ]  # fmt: skip
    excused, _ = hf.ignored_patterns(targets.model)
    with_others = overlaps.covered(rest, (targets.by_name[name] for name in came))
    names = [t.name for t in rest if t.name not in with_others and not (excused and excused.search(t.name))]
    if names:
        raise SaveError(
            f"the checkpoint has no place for {listed(names)}, which the model has; nothing was written",
            tensor=names[0],
            hint=_OWN_LAYOUT,
        )
