"""From stored tensors to those of transformers: what llama.cpp's converter did to each architecture, undone.

What is done is what transformers' own loading does (``modeling_gguf_pytorch_utils`` and ``integrations/gguf``), and the
tests hold both against each other. Nothing is computed here: each tensor is described.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightloaders import TensorInfo
from weightloaders.errors import CheckpointFormatError, DuplicateTensorError
from weightloaders.weights.reading import read_tensor
from weightloaders_gguf.header import Array
from weightloaders_gguf.names import split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from weightloaders_gguf.parts import Part


# No model has as many heads; each takes a piece of a description.
_MOST_HEADS = 1024


class Properties:
    """What a header says of a model, for those who arrange its tensors.

    Args:
        file: For messages.
        metadata: The header's.
    """

    def __init__(self, file: str, metadata: Mapping[str, Any]) -> None:
        self.file, self._metadata = file, metadata
        self.architecture = str(metadata.get("general.architecture", ""))

    def heads(self, key: str) -> int:
        """A number of heads that is one.

        Raises:
            CheckpointFormatError: If it is none that a model has.
        """
        found = self.number(key)
        if not 0 < found <= _MOST_HEADS:
            raise CheckpointFormatError(
                f"{self.file} says {self.architecture}.{key}: {found}, which is no number of heads", file=self.file
            )
        return found

    def number(self, key: str, default: int | None = None, *, layer: int | None = None) -> int:
        """A whole number, of a layer where each has its own.

        Raises:
            CheckpointFormatError: If it is not there, or is none.
        """
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, Array) and layer is not None and layer < len(value):
            value = value[layer]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointFormatError(
                f"{self.file} says {self.architecture}.{key}: {value!r}, where a whole number is needed", file=self.file
            )
        return value


def arranged(parts: Sequence[Part], name: str, properties: Properties) -> TensorInfo:
    """The tensor of that name, which is made of these parts.

    Args:
        parts: One; or those that become one, in the order of the file.
        name: What transformers calls it.
        properties: What the header says of the model.

    Raises:
        CheckpointFormatError: If they don't fit together, or the header does not say what it takes to arrange them.
        DuplicateTensorError: If they are several tensors of one name, not the pieces of one.
        UnsupportedDtypeError: If numbers of their type can't be arranged.
    """
    by_leaf = {split(part.name)[2]: part for part in parts}
    together = _TOGETHER.get(properties.architecture, {})
    for leaves, put_together in together.items():
        if set(leaves) == by_leaf.keys():
            return put_together([by_leaf[leaf] for leaf in leaves], name)
    if len(parts) > 1:
        one, other = parts[:2]
        raise DuplicateTensorError(
            f"{one.name!r} of {one.source.name} and {other.name!r} of {other.source.name} are both {name} in "
            "transformers",
            file=other.source.name,
            tensor=other.name,
            hint="the file was put together wrongly: convert the model again",
        )
    (part,) = parts
    (leaf,) = by_leaf
    lacking = next((other for leaves in together if leaf in leaves for other in leaves if other != leaf), None)
    if lacking is not None:
        raise CheckpointFormatError(
            f"{name} is made of two tensors, of which {leaf} is there, and {lacking} is not",
            file=part.source.name,
            tensor=part.name,
        )
    arrange = _ARRANGING.get(properties.architecture, _as_it_is)
    return arrange(part, name, properties)


# ------------------------------------------------------------------ one tensor


def _as_it_is(part: Part, name: str, properties: Properties | None = None) -> TensorInfo:  # noqa: ARG001
    return part.numbers().whole(name, part.shape)


def _llama(part: Part, name: str, properties: Properties) -> TensorInfo:
    """Of q and k, rotary pairs lie side by side in the file, and half a head apart in transformers' model."""
    _, layer, leaf = split(part.name)
    if not leaf.startswith(("attn_q.", "attn_k.")):
        return _as_it_is(part, name)
    heads = properties.number("attention.head_count", layer=layer)
    if leaf.startswith("attn_k."):
        heads = properties.number("attention.head_count_kv", heads, layer=layer)
    _check_dims(part, 1, 2)
    if not part.stored.nbytes:
        return _as_it_is(part, name)
    rows = part.shape[0]
    width = rows // heads if heads else 0
    order = [*range(0, width - width % 2, 2), *range(1, width, 2)]
    return part.in_groups(heads, order).whole(name, part.shape)


def _norms_less_one(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    """Norms that transformers multiplies by one more than their weight, stored as llama.cpp multiplies."""
    if not part.name.endswith("norm.weight"):
        return _as_it_is(part, name)
    return part.each(_less_one).whole(name, part.shape)


def _less_one(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    return numbers - np.float32(1)


def _mamba(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    leaf = split(part.name)[2]
    if leaf == "ssm_conv1d.weight":
        return _with_axis(part, name, 1, 2)
    if leaf == "ssm_a":
        return part.each(lambda numbers: np.log(-numbers)).whole(name, part.shape)
    return _as_it_is(part, name)


def _lfm2(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    return _with_axis(part, name, 1, 2) if part.name.endswith("shortconv.conv.weight") else _as_it_is(part, name)


def _with_axis(part: Part, name: str, at: int, dims: int) -> TensorInfo:
    """A tensor that transformers has with one axis more, of one, than the so many that llama.cpp leaves it."""
    _check_dims(part, dims)
    return part.numbers().whole(name, (*part.shape[:at], 1, *part.shape[at:]))


def _qwen2moe(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    # Some files have it as transformers has.
    is_row = "ffn_gate_inp_shexp" in part.name and len(part.shape) != 2
    return _with_axis(part, name, 0, 1) if is_row else _as_it_is(part, name)


def _gpt2(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    """GPT-2 of transformers has its matrices the other way round."""
    transposed = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    if split(part.name)[2] not in transposed or len(part.shape) != 2:
        return _as_it_is(part, name)
    rows, columns = part.shape
    run = part.numbers()
    return TensorInfo(name, run.dtype, (columns, rows), run.extent((columns, rows), strides=(1, columns)))


def _bloom(part: Part, name: str, properties: Properties) -> TensorInfo:
    """q, k and v of each head side by side, where the file has all q, then all k, then all v."""
    if "attn_qkv" not in part.name:
        return _as_it_is(part, name)
    heads = properties.heads("attention.head_count")
    _check_dims(part, 1, 2)
    rows = part.shape[0]
    if rows % (3 * heads):
        raise CheckpointFormatError(
            f"tensor {part.name!r} has {rows} rows, which are not q, k and v of {heads} heads",
            file=part.source.name,
            tensor=part.name,
        )
    width = rows // (3 * heads)
    moves = [
        ((which * heads + head) * width, (head * 3 + which) * width, width)
        for head in range(heads)
        for which in range(3)
    ]
    return part.numbers().rows(name, part.shape, moves)


def _gpt_oss(part: Part, name: str, properties: Properties) -> TensorInfo:  # noqa: ARG001
    if split(part.name)[2] != "ffn_down_exps.weight":
        return _as_it_is(part, name)
    _check_dims(part, 3)
    return _transposed_experts(part.numbers(), name, part.shape)


def _check_dims(part: Part, *allowed: int) -> None:
    if len(part.shape) not in allowed:
        raise CheckpointFormatError(
            f"tensor {part.name!r} of shape {list(part.shape)} should have {allowed[-1]} dimensions",
            file=part.source.name,
            tensor=part.name,
        )


def _transposed_experts(run: Any, name: str, shape: tuple[int, ...]) -> TensorInfo:
    experts, rows, columns = shape
    turned = (experts, columns, rows)
    return TensorInfo(name, run.dtype, turned, run.extent(turned, strides=(rows * columns, 1, columns)))


# -- Qwen3.5: linear attention, whose value heads the file has in another order

_QWEN35_NORMS = (
    "attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "output_norm.weight"
)  # fmt: skip


def _qwen35(part: Part, name: str, properties: Properties) -> TensorInfo:
    leaf = split(part.name)[2]
    if leaf in _QWEN35_NORMS:
        return part.each(_less_one).whole(name, part.shape)
    if leaf not in _QWEN35_VALUES:
        return _qwen2moe(part, name, properties)
    keys, values = properties.heads("ssm.group_count"), properties.heads("ssm.time_step_rank")
    width = properties.number("ssm.inner_size") // values
    if values % keys:
        raise CheckpointFormatError(
            f"{part.source.name} has {values} value heads for {keys} key heads, of which each has as many as the other",
            file=part.source.name,
        )
    return _QWEN35_VALUES[leaf](part, name, keys, values // keys, width, 2 * keys * properties.number("ssm.state_size"))


def _grouped(keys: int, per_key: int, width: int, before: int = 0) -> list[tuple[int, int, int]]:
    """Runs of rows: the file has the first value head of each key head, then the second of each, and so on."""
    moves = [
        (before + (value * keys + key) * width, before + (key * per_key + value) * width, width)
        for key in range(keys)
        for value in range(per_key)
    ]
    return [(0, 0, before), *moves]


def _rows(moves: Sequence[tuple[int, int, int]]) -> list[int]:
    """The row that each row comes from."""
    order = [0] * sum(count for _, _, count in moves)
    for stored, at, count in moves:
        order[at : at + count] = range(stored, stored + count)
    return order


def _check_rows(part: Part, moves: Sequence[tuple[int, int, int]], rows: int) -> None:
    if sum(count for _, _, count in moves) != rows:
        raise CheckpointFormatError(
            f"tensor {part.name!r} of shape {list(part.shape)} does not fit the heads of its model",
            file=part.source.name,
            tensor=part.name,
        )


def _value_rows(part: Part, name: str, keys: int, per_key: int, width: int, before: int) -> TensorInfo:
    leaf = split(part.name)[2]
    single = leaf in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias")
    after = before if leaf in ("attn_qkv.weight", "ssm_conv1d.weight") else 0
    moves = _grouped(keys, per_key, 1 if single else width, after)
    _check_dims(part, 1 if leaf == "ssm_dt.bias" else 2)
    _check_rows(part, moves, part.shape[0])
    shape = (part.shape[0], 1, *part.shape[1:]) if leaf == "ssm_conv1d.weight" else part.shape
    return part.numbers().rows(name, shape, moves)


def _value_columns(part: Part, name: str, keys: int, per_key: int, width: int, before: int) -> TensorInfo:  # noqa: ARG001
    moves = _grouped(keys, per_key, width)
    _check_dims(part, 2)
    _check_rows(part, moves, part.shape[-1])
    if not part.stored.nbytes:
        return _as_it_is(part, name)
    return part.in_columns(_rows(moves)).whole(name, part.shape)


def _decay(part: Part, name: str, keys: int, per_key: int, width: int, before: int) -> TensorInfo:  # noqa: ARG001
    moves = _grouped(keys, per_key, 1)
    _check_dims(part, 1)
    _check_rows(part, moves, part.shape[0])
    order = _rows(moves)

    def logarithm(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        # torch's own, which differs in the last bit from numpy's: it is what transformers takes here.
        found: NDArray[np.float32] = torch.log(-torch.from_numpy(numbers[order])).numpy()
        return found

    return part.computed(logarithm).whole(name, part.shape)


_QWEN35_VALUES: dict[str, Callable[[Part, str, int, int, int, int], TensorInfo]] = {
    "attn_qkv.weight": _value_rows,
    "attn_gate.weight": _value_rows,
    "ssm_alpha.weight": _value_rows,
    "ssm_beta.weight": _value_rows,
    "ssm_conv1d.weight": _value_rows,
    "ssm_dt.bias": _value_rows,
    "ssm_out.weight": _value_columns,
    "ssm_a": _decay,
}


# ------------------------------------------------------------------ several that become one


def _stacked(parts: Sequence[Part], name: str) -> TensorInfo:
    """Gate above up in each expert."""
    gate, up = parts
    if len(gate.shape) != 3 or gate.shape != up.shape:
        raise _unlike(gate, up)
    experts, rows, columns = gate.shape
    runs = [part.numbers() for part in parts]
    if gate.dtype != up.dtype and not (gate.dtype.is_floating_point and up.dtype.is_floating_point):
        raise _unlike(gate, up)
    dtype = functools.reduce(torch.promote_types, (run.dtype for run in runs))
    extents = [run.extent(gate.shape, at=(0, at * rows, 0)) for at, run in enumerate(runs)]
    return TensorInfo(name, dtype, (experts, 2 * rows, columns), extents)


def _interleaved(parts: Sequence[Part], name: str) -> TensorInfo:
    """Columns of gate and up in turns in each expert."""
    gate, up = parts
    if len(gate.shape) != 3 or gate.shape != up.shape:
        raise _unlike(gate, up)
    experts, rows, columns = gate.shape
    if gate.source is not up.source:
        return _in_turns(gate, up, name, (experts, columns, 2 * rows))
    return _transposed_experts(gate.between(up), name, (experts, 2 * rows, columns))


def _interleaved_biases(parts: Sequence[Part], name: str) -> TensorInfo:
    gate, up = parts
    if len(gate.shape) != 2 or gate.shape != up.shape or gate.is_coded:
        raise _unlike(gate, up)
    experts, rows = gate.shape
    if gate.source is not up.source:
        return _in_turns(gate, up, name, (experts, 2 * rows))
    return gate.between(up).whole(name, (experts, 2 * rows))


def _in_turns(gate: Part, up: Part, name: str, shape: tuple[int, ...]) -> TensorInfo:
    """Gate and up of a split model that was cut between them: no file has both, so they meet when they are read."""
    if gate.type != up.type:
        raise _unlike(gate, up)
    halves = [part.numbers().whole(part.name, part.shape) for part in (gate, up)]
    read = functools.partial(_read_in_turns, halves, shape)
    return TensorInfo(name, gate.dtype, shape, read=read, sources=[gate.source, up.source])


def _read_in_turns(halves: Sequence[TensorInfo], shape: tuple[int, ...]) -> torch.Tensor:
    experts = shape[0]
    made = torch.empty(shape, dtype=halves[0].dtype, device="cpu")
    # The last dimension of the whole has both in turns; before it come the columns, if there are any.
    for at, half in enumerate(halves):
        made[..., at::2] = read_tensor(half).reshape(experts, shape[-1] // 2, *shape[1:-1]).movedim(1, -1)
    return made


def _unlike(gate: Part, up: Part) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the tensors {gate.name!r} ({gate.type.name}, {list(gate.shape)}) and {up.name!r} ({up.type.name}, "
        f"{list(up.shape)}) are to be one, but don't fit together",
        file=up.source.name,
        tensor=up.name,
    )


_PutTogether = Callable[["Sequence[Part]", str], TensorInfo]
_EXPERTS: dict[tuple[str, str], _PutTogether] = {("ffn_gate_exps.weight", "ffn_up_exps.weight"): _stacked}
_TOGETHER: dict[str, dict[tuple[str, str], _PutTogether]] = {
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "qwen35moe": _EXPERTS,
    "minimax-m2": _EXPERTS,
    "gpt-oss": {
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"): _interleaved,
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"): _interleaved_biases,
    },
}
_ARRANGING: dict[str, Callable[[Part, str, Properties], TensorInfo]] = {
    "llama": _llama,
    "mistral": _llama,
    "deci": _llama,
    "qwen2moe": _qwen2moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "gpt-oss": _gpt_oss,
    "bloom": _bloom,
    "gpt2": _gpt2,
    "mamba": _mamba,
    "nemotron": _norms_less_one,
    "gemma2": _norms_less_one,
    "gemma3": _norms_less_one,
    "lfm2": _lfm2,
}
