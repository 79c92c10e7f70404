"""Which tensors of a checkpoint are the model's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.errors import AmbiguousSourceError, CheckpointFormatError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightloaders_dcp.metadata import StoredTensor

# A key made of these words alone wraps a state dict, and one with any of the others leads to no weights; as the core's
# `weightloaders.weights.state_dict` has it, and what training programs that save by DCP have beside.
_WRAPPER = frozenset(
    {"state", "dict", "model", "module", "net", "network", "params", "parameters", "weights"}
    | {"ema", "avg", "swa", "shadow", "teacher", "student", "generator", "app"}
)
_TRAINER = frozenset(
    {"optimizer", "optimizers", "optim", "scheduler", "schedulers", "scaler", "amp", "grad", "rng"}
    | {"callbacks", "loops", "hparams", "hyper", "train", "trainer", "dataloader"}
)
_SHOWN = 6


class Choice(NamedTuple):
    """The model's part of a checkpoint.

    Attributes:
        tensors: Its tensors, by the names that they have in the model's own state dict.
        key: The keys that lead there, joined with dots; empty for the whole.
        left_out: What else there is, in words.
    """

    tensors: dict[str, StoredTensor]
    key: str
    left_out: tuple[str, ...]


def choose(tensors: Sequence[StoredTensor], key: str | None, file: str) -> Choice:
    """Pick the model's tensors.

    Args:
        tensors: All tensors of the checkpoint.
        key: The keys that lead to the model's, joined with dots; ``""`` for all there are, None to look for them.
        file: The checkpoint, for messages.

    Raises:
        AmbiguousSourceError: If several parts could be meant.
        CheckpointFormatError: If there are no weights.
        OptionsError: If ``key`` leads nowhere.
    """
    if key is not None:
        return _under(tensors, key, file)
    paths = _paths(tensors)
    weights = [tensor for tensor in tensors if not any(_is_trainers(step) for step in paths[tensor.name][:-1])]
    if not weights:
        raise CheckpointFormatError(
            f"{file} holds no weights: {_listed(_groups(tensors, paths)) or 'there are no tensors'}",
            file=file,
            hint="say where they are, e.g. key='model'" if tensors else None,
        )
    wrapped = Counter(prefix for tensor in weights if (prefix := _wrapper(paths[tensor.name])))
    if not wrapped:
        return _chosen(weights, "", lambda tensor: tensor.name, tensors, paths)
    # Beside a wrapper, a scalar is a step counter.
    bare = [t for t in weights if not _wrapper(paths[t.name]) and t.shape and t.dtype.is_floating_point]
    if len(wrapped) > 1 or bare:
        found = [f"{'.'.join(prefix)!r} ({count} tensors)" for prefix, count in wrapped.items()]
        found += [f"{len(bare)} tensors beside these"] if bare else []
        raise AmbiguousSourceError(
            f"{file} holds several sets of weights: {_listed(found)}",
            file=file,
            hint=f"say which one is meant, e.g. key={'.'.join(next(iter(wrapped)))!r}; key='' takes all",
        )
    (prefix,) = wrapped
    inside = [tensor for tensor in weights if _wrapper(paths[tensor.name])]
    return _chosen(inside, ".".join(prefix), lambda t: ".".join(paths[t.name][len(prefix) :]), tensors, paths)


def _under(tensors: Sequence[StoredTensor], key: str, file: str) -> Choice:
    front = f"{key}." if key else ""
    inside = [tensor for tensor in tensors if tensor.name.startswith(front)]
    paths = _paths(tensors)
    if not inside:
        raise OptionsError(
            f"{file} has no tensors under key={key!r}",
            file=file,
            hint=f"it holds {_listed(_groups(tensors, paths)) or 'no tensors'}",
        )
    return _chosen(inside, key, lambda tensor: tensor.name.removeprefix(front), tensors, paths)


def _chosen(
    inside: Sequence[StoredTensor],
    key: str,
    named: Callable[[StoredTensor], str],
    tensors: Sequence[StoredTensor],
    paths: dict[str, tuple[str, ...]],
) -> Choice:
    taken = {tensor.name for tensor in inside}
    rest = [tensor for tensor in tensors if tensor.name not in taken]
    return Choice({named(tensor): tensor for tensor in inside}, key, tuple(_groups(rest, paths)))


def _paths(tensors: Sequence[StoredTensor]) -> dict[str, tuple[str, ...]]:
    """The keys that lead to each tensor. Where nobody wrote them down, names that an optimizer is among show them."""
    flat = {tensor.name: tensor.name.partition(".") for tensor in tensors if len(tensor.path) == 1}
    nested = len(flat) == len(tensors) and any(dot and _is_trainers(first) for first, dot, _ in flat.values())
    return {
        tensor.name: (flat[tensor.name][0], flat[tensor.name][2])
        if nested and flat[tensor.name][1]
        else tensor.path
        for tensor in tensors
    }  # fmt: skip


def _wrapper(path: tuple[str, ...]) -> tuple[str, ...]:
    """The keys that wrap a tensor's state dict."""
    end = 0
    for step in path[:-1]:
        if not _words(step) <= _WRAPPER:
            break
        end += 1
    return path[:end]


def _is_trainers(step: str) -> bool:
    return bool(_words(step) & _TRAINER)


def _words(step: str) -> set[str]:
    return set(step.lower().replace("-", "_").split("_"))


def _groups(tensors: Iterable[StoredTensor], paths: dict[str, tuple[str, ...]]) -> list[str]:
    counts = Counter(paths[tensor.name][0] for tensor in tensors)
    return [f"{name} ({count} {'tensors' if count > 1 else 'tensor'})" for name, count in counts.items()]


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
