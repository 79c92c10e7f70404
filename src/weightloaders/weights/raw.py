"""The raw binary format: ``meta.txt`` says what lies in ``model.bin``, which is nothing but values.

Each line of ``meta.txt`` describes one tensor, and ``model.bin`` holds their values in that order, packed, row-major::

    # a comment
    embed.weight:32000,576:bfloat16
    norm.weight:576
    scale:

That is ``name:sizes``, with ``:dtype`` where it is not the one agreed on (float32); no sizes is a scalar. Names may
contain colons, for a line is taken apart from its end.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import CheckpointFormatError, DuplicateTensorError, OptionsError, SaveError
from weightloaders.weights.atomic import make_durable, new_file, replaced_files, saving
from weightloaders.weights.info import ByteOrder, Extent, TensorInfo
from weightloaders.weights.reading import enough_memory, memory_of
from weightloaders.weights.sniff import describe_content
from weightloaders.weights.texts import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from weightloaders.weights.source import ByteSource

DATA_FILE, META_FILE = "model.bin", "meta.txt"
DEFAULT_DTYPE = torch.float32

# A line takes a hundred bytes, a checkpoint of a million tensors so a hundred million.
_MAX_META_BYTES = 1 << 28
_SIZES = re.compile(r"[0-9]{1,20}(\s*,\s*[0-9]{1,20})*|", re.ASCII)
_ALIASES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "fp32": torch.float32,
    "f16": torch.float16,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# What a cast may lead from and to. Integers, bool, complex and 8-bit codes mean something else than their value.
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def named_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name, torch's (``"torch.float16"``, ``"float16"``) or short (``"f16"``); None if there is none."""
    dtype = _ALIASES.get(name) or getattr(torch, name.removeprefix("torch."), None)
    # The values of a quantized dtype are numbers only together with a scale that a tensor of it carries.
    return dtype if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q") else None


def dtype_option(value: torch.dtype | str, option: str, *, real: bool = False) -> torch.dtype:
    """An option's value as a dtype.

    Args:
        value: A dtype or its name.
        option: The option, for messages.
        real: Only the dtypes that values are cast to are allowed: float64, float32, float16, bfloat16.

    Raises:
        OptionsError: If it is none, or not such a one.
    """
    dtype = named_dtype(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise OptionsError(f"{option}={value!r} is no dtype{_nearest(str(value))}", hint='for example "bfloat16"')
    if real and dtype not in _REAL:
        raise OptionsError(
            f"{option}={dtype} is nothing that values are cast to; that is "
            f"{', '.join(str(d).removeprefix('torch.') for d in _REAL)}"
        )
    return dtype


def read_raw(
    data: ByteSource,
    meta: ByteSource,
    *,
    dtype: torch.dtype | None = None,
    stored_dtype: torch.dtype = DEFAULT_DTYPE,
    byteorder: ByteOrder = "little",
) -> list[TensorInfo]:
    """Catalogue a pair of files; no value is read.

    Args:
        data: The values.
        meta: The description.
        dtype: What floating-point tensors are handed out in; None: as stored. Others are always as stored.
        stored_dtype: What lies in ``data`` where ``meta`` does not say.
        byteorder: Of the values.

    Raises:
        CheckpointFormatError: If a line can't be understood, or the two files disagree about the size.
        DuplicateTensorError: If two lines have one name.
    """
    infos: list[TensorInfo] = []
    lines: dict[str, int] = {}
    position = 0
    overrun: _Line | None = None
    for line in _lines(meta, stored_dtype):
        if line.name in lines:
            raise DuplicateTensorError(
                f"{meta.name} describes {line.name!r} twice, in lines {lines[line.name]} and {line.number}",
                file=meta.name,
                tensor=line.name,
            )
        lines[line.name] = line.number
        end = position + math.prod(line.shape) * line.dtype.itemsize
        if end > data.size:
            overrun = overrun or line
        if overrun is None:
            handed_out = dtype if dtype is not None and line.dtype in _REAL else line.dtype
            extent = Extent(data, position, dtype=line.dtype, byteorder=byteorder)
            infos.append(TensorInfo(line.name, handed_out, line.shape, (extent,)))
        position = end
    if not lines:
        raise CheckpointFormatError(f"{meta.name} describes no tensors", file=meta.name)
    if position != data.size:
        raise _sizes_differ(data, meta, position, overrun, stored_dtype)
    return infos


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _lines(meta: ByteSource, stored_dtype: torch.dtype) -> Iterator[_Line]:
    if meta.size > _MAX_META_BYTES:
        raise CheckpointFormatError(
            f"{meta.name} has {meta.size} bytes; a description of at most {_MAX_META_BYTES} makes sense", file=meta.name
        )
    try:
        text = meta.read(0, meta.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"{meta.name} is not text in UTF-8: {error}", file=meta.name) from error
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield _parsed(stripped, number, meta.name, stored_dtype)


def _parsed(line: str, number: int, file: str, stored_dtype: torch.dtype) -> _Line:
    name, colon, last = line.rpartition(":")
    dtype: torch.dtype | None = stored_dtype
    if colon and not _SIZES.fullmatch(last.strip()):
        # What is last is no sizes, so it is the dtype, and the sizes are before it.
        dtype = named_dtype(last.strip())
        name, colon, sizes = name.rpartition(":")
        if dtype is None and colon and _SIZES.fullmatch(sizes.strip()):
            raise CheckpointFormatError(
                f"line {number} of {file} names the unknown dtype {last.strip()!r}{_nearest(last.strip())}", file=file
            )
    else:
        sizes = last
    name, sizes = name.strip(), sizes.strip()
    if not colon or not name or dtype is None or not _SIZES.fullmatch(sizes):
        shown = line if len(line) <= 80 else line[:80] + "…"
        raise CheckpointFormatError(
            f"line {number} of {file} is not name:sizes or name:sizes:dtype: {shown!r}",
            file=file,
            hint='for example "embed.weight:32000,576" or "embed.weight:32000,576:bfloat16"',
        )
    return _Line(number, name, tuple(int(size) for size in sizes.split(",")) if sizes else (), dtype)


def _sizes_differ(
    data: ByteSource, meta: ByteSource, claimed: int, overrun: _Line | None, stored_dtype: torch.dtype
) -> CheckpointFormatError:
    message = f"{data.name} has {data.size} bytes, but {meta.name} describes {claimed}"
    if overrun is not None:
        message += f"; the values of {overrun.name!r} (line {overrun.number}) are the first to reach beyond its end"
    fitting = [
        str(d).removeprefix("torch.")
        for d in _REAL
        if d.itemsize != stored_dtype.itemsize and d.itemsize * claimed == data.size * stored_dtype.itemsize
    ]
    content = describe_content(data)
    if fitting:
        hint = f"the sizes would agree if another dtype than {stored_dtype} lay there, e.g. stored_dtype={fitting[0]!r}"
    elif content is not None:
        hint = f"{data.name} looks like {content}"
    else:
        hint = "the file is truncated, or one of the two belongs to another checkpoint"
    return CheckpointFormatError(message, file=data.name, tensor=overrun.name if overrun else None, hint=hint)


def is_meta(head: bytes) -> bool:
    """Whether a text that begins with these bytes can be a description; its last line may be cut off."""
    lines = head.decode("utf-8-sig", "replace").split("\n")
    described = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    try:
        return bool(described) and _parsed(described[0], 1, "", DEFAULT_DTYPE).name != ""
    except CheckpointFormatError:
        return False


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.removeprefix("torch."), _dtype_names(), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@cache
def _dtype_names() -> list[str]:
    return [*_ALIASES, *(name for name in dir(torch) if named_dtype(name) is not None)]


def write_raw(folder: Path, infos: Iterable[TensorInfo], tensors: Callable[[str], torch.Tensor]) -> None:
    """Write tensors as ``model.bin`` and ``meta.txt``: one in memory at a time, both files whole or not at all.

    Args:
        folder: Where to; made if absent. The same two files in it are replaced.
        infos: The tensors, in the order to write them. Each is stored in its ``dtype``.
        tensors: Returns a tensor by its name.

    Raises:
        SaveError: If a name can't stand in ``meta.txt``, a tensor is not what its info says, or writing fails.
    """
    draft = RawFolder(folder, infos)
    with replaced_files(folder, {DATA_FILE, META_FILE}.__contains__) as stage:
        draft.write(stage, tensors)


class RawFolder:
    """The two files before they are written.

    Args:
        folder: Where they are to lie in the end, for messages.
        infos: As for `write_raw`.

    Raises:
        SaveError: If a name can't stand in ``meta.txt``, or occurs twice, or a dtype has no raw values.
    """

    def __init__(self, folder: Path, infos: Iterable[TensorInfo]) -> None:
        self._folder = folder
        self._infos = list(infos)
        lines: dict[str, str] = {}
        for info in self._infos:
            if info.name in lines:
                raise SaveError(f"two tensors are named {info.name!r}", file=folder, tensor=info.name)
            lines[info.name] = _line_for(info, folder)
        self._meta = "".join(f"{line}\n" for line in lines.values()).encode()

    def write(self, stage: Path, tensors: Callable[[str], torch.Tensor]) -> None:
        """Write both into a folder, and have the disk hold them; raises as `write_raw`."""
        with new_file(stage / DATA_FILE, self._folder) as file:
            for info in self._infos:
                self._write_tensor(file, tensors(info.name), info)
            with saving(self._folder):
                make_durable(file)
        with saving(self._folder), (stage / META_FILE).open("xb") as file:
            file.write(self._meta)
            make_durable(file)

    def _write_tensor(self, file: BinaryIO, tensor: torch.Tensor, info: TensorInfo) -> None:
        # A function of its own: when it returns, the tensor is let go before the next one is asked for.
        with enough_memory(info.name, info.nbytes, SaveError, file=self._folder):
            values = _plain(tensor, info, self._folder)
        with saving(self._folder):
            file.write(memory_of(values))


def _line_for(info: TensorInfo, folder: Path) -> str:
    dtype = str(info.dtype).removeprefix("torch.")
    line = f"{info.name}:{','.join(map(str, info.shape))}" + ("" if info.dtype == DEFAULT_DTYPE else f":{dtype}")
    if (
        not info.name
        or info.name != info.name.strip()
        or "\n" in info.name
        or info.name.startswith(("#", "\ufeff"))
        or not is_text(info.name)
    ):
        raise SaveError(
            f"the name {info.name!r} can't stand in {META_FILE}: names begin and end with a visible character other "
            "than '#', and are of one line of text",
            file=folder,
            tensor=info.name,
        )
    if named_dtype(dtype) is None:
        raise SaveError(f"{info.name!r} is {info.dtype}, which has no raw values", file=folder, tensor=info.name)
    return line


def _plain(tensor: torch.Tensor, info: TensorInfo, folder: Path) -> torch.Tensor:
    if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
        raise SaveError(
            f"{info.name!r} is {list(tensor.shape)} {tensor.dtype}, not {list(info.shape)} {info.dtype} as described",
            file=folder,
            tensor=info.name,
        )
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
