"""Quantised checkpoints of transformers' models: which tensors belong together, and what becomes of them.

transformers' quantizer for a model either replaced modules, so that codes and scales are parameters of their own and
are filled like any others, or has the codes multiplied by their scales on the way: it *de-quantises*. These pieces are
not public in transformers (``HfQuantizer``; there since 5.21, verified with 5.24). In older ones they have another
form, and quantised checkpoints are refused there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from weightloaders.errors import CheckpointFormatError, IncompleteCheckpointError, ModelError
from weightloaders.mapping.dtypes import is_codes
from weightloaders.mapping.float8 import can_multiply, multiplied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping, Sequence

    from torch import nn


class Quantisation:
    """How a model takes a quantised checkpoint.

    Args:
        quantizer: transformers' own for the checkpoint's method.
        asked: Whether somebody asked that the weights be de-quantised.

    Attributes:
        quantizer: See above.
        asked: See above.
        transforms: transformers' renames and conversions of the last plan.
        met_codes: Whether a plan has met any codes.

    Raises:
        ModelError: If this version of transformers is too old.
    """

    def __init__(self, quantizer: Any, *, asked: bool = False) -> None:
        if not hasattr(quantizer, "get_load_operations"):
            method = method_of(quantizer.quantization_config)
            raise ModelError(
                f"checkpoints quantised with {method} need transformers 5.21 or newer, and this is "
                f"{metadata.version('transformers')}",
                hint="pip install --upgrade transformers; or convert the checkpoint to plain weights first",
            )
        self.quantizer = quantizer
        self.asked = asked
        self.transforms: list[Any] = []
        self.met_codes = False

    @property
    def method(self) -> str:
        """The method, as transformers calls it, e.g. ``fp8``."""
        return method_of(self.quantizer.quantization_config)

    @property
    def dequantises(self) -> bool:
        """Whether the model has plain weights in the end."""
        return bool(getattr(self.quantizer.quantization_config, "dequantize", False))

    def loads(self, converter: Any) -> bool:
        """Whether a conversion of transformers takes codes with their scales: what it gets is not to be cast before."""
        return any(getattr(operation, "hf_quantizer", None) is not None for operation in converter.operations)

    def multiply_by_own_means(self, converter: Any) -> None:
        """Let a conversion multiply codes by their scales faster, and where blocks at a weight's end are smaller.

        transformers' own de-quantisation refuses such a weight, or cuts it into as many blocks of equal size, which are
        other blocks than those that were quantised.
        """
        for operation in converter.operations:
            theirs = getattr(operation, "_dequantize_one", None)
            if theirs is not None:
                operation._dequantize_one = functools.partial(_multiplied, theirs, self._block)  # noqa: SLF001 -- see above

    @property
    def _block(self) -> Sequence[int] | None:
        """Rows and columns of a block that has one scale, where the config tells."""
        return getattr(self.quantizer.quantization_config, "weight_block_size", None)

    def has_codes(self, slots: Mapping[str, Sequence[torch.Tensor]], names: Mapping[str, str]) -> bool:
        """Whether there are codes to be multiplied among the sources of a conversion, all of them with their scales.

        Args:
            slots: Pattern of a source -> the tensors of that kind.
            names: Pattern of a source -> the name of one of these tensors.

        Raises:
            IncompleteCheckpointError: If there are codes without scales, or scales without codes.
            CheckpointFormatError: If scales are not of the shape that goes with their codes, or experts are not of one
                shape.
        """
        found = False
        for stem, (code, scale, *others) in self._weights(slots):
            codes, scales = slots.get(stem + code, ()), slots.get(stem + scale, ())
            if scales and not any(slots.get(stem + part) for part in (code, *others)):
                raise _half(names[stem + scale], scale, code, "the weight that it belongs to")
            if not scales and any(is_codes(tensor.dtype) for tensor in codes):
                raise _half(names[stem + code], code, scale, "its scales")
            found = found or bool(scales)
            for tensor, its_scales in zip(codes, scales, strict=False):
                self._check_shapes(tensor, its_scales, names[stem + code], names[stem + scale])
            for tensors, part in ((codes, code), (scales, scale)):
                _check_alike(tensors, names.get(stem + part, ""))
        self.met_codes = self.met_codes or found
        return found

    def plain_weight(self, slots: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor | None:
        """The only source of a conversion, where that is a weight that was not quantised."""
        present = {pattern: tensors for pattern, tensors in slots.items() if tensors}
        weights = {stem + code for stem, (code, *_) in self._weights(slots)}
        pattern, tensors = next(iter(present.items()), ("", ()))
        return tensors[0] if len(present) == 1 and pattern in weights else None

    def suffices(self, slots: Mapping[str, Sequence[torch.dtype]]) -> bool:
        """Whether a conversion may do without the sources that have not come; of those that form a list more may come.

        Args:
            slots: Pattern of a source -> the dtypes of what has come of that kind.
        """
        if self._static and not all(slots.values()):
            return False
        return all(
            slots.get(stem + code) and (slots.get(stem + scale) or not any(map(is_codes, slots[stem + code])))
            for stem, (code, scale, *_) in self._weights(slots)
        )

    def _weights(self, slots: Iterable[str]) -> list[tuple[str, list[str]]]:
        """The weights that patterns speak of: what is in front, and what the parts of the weight are called there."""
        return [
            (stem, parts)
            for parts in self.quantizer.serialized_names.values()
            if len(parts) > 1
            for stem in dict.fromkeys(p.removesuffix(part) for p in slots for part in parts if p.endswith(part))
        ]

    @property
    def _static(self) -> bool:
        """Whether activations have scales too."""
        return getattr(self.quantizer.quantization_config, "activation_scheme", "") == "static"

    def _check_shapes(self, codes: torch.Tensor, scales: torch.Tensor, name: str, scales_name: str) -> None:
        block = self._block
        if self.method == "mxfp4":
            wanted, how = tuple(codes.shape[:-1]), "one for each block"
        elif block is not None and _is_float8(codes.dtype) and codes.dim() > 1:
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


def remember(model: nn.Module, quantisation: Quantisation) -> None:
    """From now on the model takes checkpoints that are quantised in this way."""
    _of_model[model] = quantisation


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """How a model takes a quantised checkpoint; None for a plain one.

    A model that was de-quantised is plain from then on, but a checkpoint of the same kind can be loaded into it again.
    """
    known = _of_model.get(model)
    if known is None and (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        known = _of_model[model] = Quantisation(quantizer)
    return known


def _check_alike(tensors: Sequence[torch.Tensor], name: str) -> None:
    shapes = dict.fromkeys(tuple(tensor.shape) for tensor in tensors)
    if len(shapes) > 1:
        raise CheckpointFormatError(
            f"{name!r} and its like have several shapes: {', '.join(str(list(shape)) for shape in shapes)}",
            tensor=name,
            hint="tensors that are stacked must be of one shape: fetch or export the checkpoint again",
        )


def _half(name: str, part: str, other: str, what: str) -> IncompleteCheckpointError:
    absent = name.removesuffix(part) + other if name.endswith(part) else other
    return IncompleteCheckpointError(
        f"{name!r} is there without {what}, {absent!r}",
        tensor=name,
        hint="the checkpoint is incomplete: fetch or export it again",
    )


def one_by_one(
    converter: Any,
    slots: Mapping[str, Sequence[torch.Tensor]],
    run: Callable[[Mapping[str, Sequence[torch.Tensor]]], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """De-quantise experts one by one, where they only lie one behind the other in the result.

    All at once each would be in memory several times: de-quantised, stacked, and joined with others.

    Args:
        converter: transformers' conversion.
        slots: Pattern of a source -> the tensors of that kind, of one expert after the other, all of one shape.
        run: What the conversion makes of some of them.
    """
    counts = {len(tensors) for tensors in slots.values() if tensors}
    if len(counts) != 1 or counts == {1} or not all(map(_keeps_experts_apart, converter.operations[1:])):
        return run(slots)
    (count,) = counts
    results: dict[str, torch.Tensor] = {}
    for expert in range(count):
        one = run({pattern: tensors[expert : expert + 1] for pattern, tensors in slots.items()})
        for name, result in one.items():
            if name not in results:
                results[name] = result.new_empty((count, *result.shape[1:]))
            results[name][expert] = result[0]
        if all(result.is_meta for result in one.values()):
            # Without values there is nothing more to be had.
            break
    return results


def _keeps_experts_apart(operation: Any) -> bool:
    """Whether an operation leaves the first dimension, which is the experts', alone once it is there."""
    kind, dim = type(operation).__name__, getattr(operation, "dim", -1)
    return (kind == "MergeModulelist" and dim == 0) or (kind == "Concatenate" and dim > 0)


def _multiplied(
    theirs: Callable[..., torch.Tensor],
    block: Sequence[int] | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """What transformers makes of codes and scales, and what it would make of blocks that are smaller at the end."""
    sizes, grid = codes.shape[-2:], scales.shape[-2:]
    is_cut = (
        block is not None and _is_float8(codes.dtype) and any(size % by for size, by in zip(sizes, block, strict=True))
    )
    if options.keys() <= {"output_dtype"} and can_multiply(codes, scales):
        by = block if is_cut else _even_blocks(sizes, grid)
        if by is not None:
            dtype = options.get("output_dtype") or (scales.dtype if scales.dtype.itemsize > 1 else torch.bfloat16)
            return multiplied(codes, scales, by, dtype)
    if block is None or not is_cut:
        return theirs(codes, scales, **options)
    # With the last row and column of blocks filled up with zeros.
    padded = codes.new_zeros((*codes.shape[:-2], *(-(-size // by) * by for size, by in zip(sizes, block, strict=True))))
    padded[..., : sizes[0], : sizes[1]] = codes
    return theirs(padded, scales, **options)[..., : sizes[0], : sizes[1]]


def _even_blocks(sizes: Sequence[int], grid: Sequence[int]) -> list[int] | None:
    """The blocks that transformers takes there to be, unless it is told: of one size; None where they can't be."""
    if any(size % count for size, count in zip(sizes, grid, strict=True)):
        return None
    return [size // count for size, count in zip(sizes, grid, strict=True)]


def _is_float8(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of the 8-bit floats."""
    return dtype.is_floating_point and dtype.itemsize == 1


def told(declared: Any, key: str) -> Any:
    """What a ``quantization_config``, an object of transformers or a mapping, says."""
    return declared.get(key) if isinstance(declared, Mapping) else getattr(declared, key, None)


def method_of(declared: Any) -> str:
    """The method of a ``quantization_config``, e.g. ``fp8``; empty where it names none."""
    method = told(declared, "quant_method") or ("bitsandbytes" if told(declared, "load_in_4bit") else "")
    return str(getattr(method, "value", method))
