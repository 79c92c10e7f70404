"""Finding the state dict inside what a checkpoint file holds.

Trainers wrap a state dict with the epoch, the optimizer, an averaged copy. The usual wrappers are unwrapped; where
nothing decides between two, the user does, with ``key``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import AmbiguousSourceError, CheckpointFormatError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator

# A key made of these words alone wraps a state dict: state_dict, model, module, ema, model_state_dict, params_ema, ...
_WRAPPER_WORDS = frozenset(
    {"state", "dict", "model", "module", "net", "network", "params", "parameters", "weights"}
    | {"ema", "avg", "swa", "shadow", "teacher", "student", "generator"}
)
# A key with one of these words holds the state of a training run, whose tensors are no weights.
_TRAINER_WORDS = frozenset(
    {"optimizer", "optimizers", "optim", "scheduler", "schedulers", "scaler", "amp", "grad", "rng"}
    | {"callbacks", "loops", "hparams", "hyper"}
)
# Deeper than anybody wraps; a pickle may hold a dict that contains itself.
_MAX_DEPTH = 6
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StateDict:
    """A state dict that was found.

    Args:
        tensors: Its tensors by name, in the order of the file.
        key: Dotted path to it within the file; ``""`` for the whole file.
        left_out: What else the file holds, as ``key (what it is)``.
        non_tensors: The names in the state dict itself that stand for something other than a tensor.
    """

    tensors: dict[str, torch.Tensor]
    key: str
    left_out: tuple[str, ...]
    non_tensors: frozenset[str]


def find_state_dict(root: Any, *, key: str | None, file: str) -> StateDict:
    """Pick the state dict out of a file's content.

    Args:
        root: What the file holds.
        key: Dotted path to the state dict; ``""`` for the whole file, None to look for it.
        file: The file, for messages.

    Raises:
        AmbiguousSourceError: If several dicts could be meant, or the only ones carry no name that says so.
        CheckpointFormatError: If there is no state dict.
        OptionsError: If ``key`` leads nowhere.
    """
    path: tuple[str, ...] = ()
    if key:
        path = _resolve(root, key, file)
    node = _at(root, path)
    _check_is_mapping(node, path, file)
    if key is None or not _tensors(node):
        path += _choose(node, path, file)
    chosen = _at(root, path)
    tensors = _tensors(chosen)
    others = frozenset(name for name in chosen if isinstance(name, str) and name not in tensors)
    return StateDict(tensors, ".".join(path), tuple(_left_out(root, path)), others)


def _choose(node: Mapping[Any, Any], above: tuple[str, ...], file: str) -> tuple[str, ...]:
    nested = list(_state_dicts(node, ()))
    wrapped = [path for path in nested if all(_words(part) <= _WRAPPER_WORDS for part in path)]
    own = _tensors(node)
    if wrapped:
        candidates = [(), *wrapped] if any(_is_weight(*item) for item in own.items()) else wrapped
        if len(candidates) == 1:
            return candidates[0]
        reason = "holds several state dicts"
    elif own:
        return ()
    elif nested:
        candidates, reason = nested, "holds its tensors in nested dicts, none of which is named as a wrapper of weights"
    else:
        raise CheckpointFormatError(
            f"{file} holds no tensors: {_what(node)} with {_listed([_label(k) for k in node]) or 'nothing in it'}",
            file=file,
            hint="weights are a dict that maps names to tensors, as `model.state_dict()` returns it",
        )
    keys = [".".join(above + path) for path in candidates]
    sizes = [f"{k!r} ({len(_tensors(_at(node, path)))} tensors)" for k, path in zip(keys, candidates, strict=True)]
    raise AmbiguousSourceError(
        f"{file} {reason}: {_listed(sizes)}", file=file, hint=f"say which one is meant, e.g. key={keys[-1]!r}"
    )


def _state_dicts(node: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the nested dicts that hold tensors directly; one object under two names is given once."""
    seen: set[int] = set()

    def walk(node: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key, value in node.items():
            if not isinstance(key, str) or not isinstance(value, Mapping) or id(value) in seen:
                continue
            if _words(key) & _TRAINER_WORDS or len(path) >= _MAX_DEPTH:
                continue
            seen.add(id(value))
            if _tensors(value):
                yield (*path, key)
            else:
                yield from walk(value, (*path, key))

    seen.add(id(node))
    yield from walk(node, path)


def _resolve(root: Any, key: str, file: str) -> tuple[str, ...]:
    """The dotted key as a path; a key of a dict may itself contain dots."""

    def walk(node: Any, rest: str) -> tuple[str, ...] | None:
        if not isinstance(node, Mapping):
            return None
        if rest in node:
            return (rest,)
        for cut in (i for i, character in enumerate(rest) if character == "."):
            if rest[:cut] in node and (tail := walk(node[rest[:cut]], rest[cut + 1 :])) is not None:
                return (rest[:cut], *tail)
        return None

    path = walk(root, key)
    if path is None:
        _check_is_mapping(root, (), file)
        there = [".".join(found) for found in _state_dicts(root, ())] or list(root)
        raise OptionsError(
            f"{file} has nothing under key={key!r}", file=file, hint=f"it holds {_listed([_label(k) for k in there])}"
        )
    return path


def _check_is_mapping(node: Any, path: tuple[str, ...], file: str) -> None:
    if isinstance(node, Mapping):
        return
    place = f"key={'.'.join(path)!r} in {file}" if path else file
    if isinstance(node, torch.nn.Module):
        raise CheckpointFormatError(
            f"{place} is a whole pickled model ({type(node).__name__}), not a state dict",
            file=file,
            hint="where it was made: torch.save(model.state_dict(), path)",
        )
    raise CheckpointFormatError(
        f"{place} is {_what(node)}, not a dict that maps names to tensors",
        file=file,
        hint="save the weights as a dict, as `model.state_dict()` returns it",
    )


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


def _tensors(node: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in node.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}


def _words(key: str) -> set[str]:
    return set(key.lower().replace("-", "_").split("_"))


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    # Beside a wrapper, a scalar is a step counter or a loss, and whole numbers are a random generator's state.
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return floating and math.prod(tensor.shape) > 1 and not _words(name) & _TRAINER_WORDS


def _left_out(root: Any, path: tuple[str, ...]) -> Iterator[str]:
    node, above = root, ""
    for part in (*path, None):
        if not isinstance(node, Mapping):
            return
        for key, value in node.items():
            taken = key == part if part is not None else isinstance(key, str) and isinstance(value, torch.Tensor)
            if not taken:
                yield f"{above}{key if isinstance(key, str) else _label(key)} ({_what(value)})"
        if part is not None:
            node, above = node[part], f"{above}{part}."


def _label(key: Any) -> str:
    """A key of a dict, for messages; of what is not plain, such as nested tuples, the kind alone."""
    return repr(key) if isinstance(key, str | int | float | None) else _what(key)


def _what(value: Any) -> str:
    if isinstance(value, Mapping):
        tensors = len(_tensors(value))
        return f"a dict of {tensors} tensors" if tensors else "a dict"
    return f"{'an' if type(value).__name__[:1] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


def _listed(items: list[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
