"""`NpzLoader`: says what a NumPy ``.npz`` archive holds, and where in the file it lies.

An archive is a zip file with one ``.npy`` member an array. A member is a short header and then the values; where the
zip file stores it uncompressed, as ``numpy.savez`` does, the values can be read from their place in the archive.
The formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and section 4.3 of
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import errno
import fnmatch
import math
import os
import struct
import zipfile
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

# Its names are resolved on first use. Like torch and numpy below, they are not needed for listing the loaders.
import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    SourceError,
    SourceNotFoundError,
    UnsupportedDtypeError,
    WeightLoadersError,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

# No deflate stream expands more than this; a member that claims to would only exhaust memory.
_MAX_DEFLATE_RATIO = 1032


class NpzLoader(wl.BaseWeightLoader):
    """Reads a ``.npz`` archive: a file, or the one in a folder.

    Args:
        file_pattern: Which file of a folder is meant.
    """

    description = "NumPy's .npz archives"

    def __init__(self, file_pattern: str = "*.npz") -> None:
        self.file_pattern = file_pattern

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Describe the arrays of an archive; nothing but their headers is read.

        Raises:
            SourceNotFoundError: If there is no such file, or none in the folder.
            AmbiguousSourceError: If the folder holds several.
            CheckpointFormatError: If it is not a sound archive of arrays that torch can hold.
        """
        path = _find(Path(model_name_or_path), self.file_pattern)
        try:
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.infolist() if not m.is_dir()]
                arrays = [m for m in members if m.filename.endswith(".npy")]
                infos = [_describe(path, archive, member) for member in arrays]
        except WeightLoadersError:
            raise
        except Exception as error:  # a damaged archive makes zipfile and numpy raise all kinds
            # zipfile says of what it can't read that it is no archive.
            for fault in (error, error.__context__):
                if isinstance(fault, OSError) and _is_the_systems(fault):
                    raise fault from None
            raise CheckpointFormatError(f"{path} is not a sound .npz archive: {error}", file=path) from error
        if members and not arrays:
            raise CheckpointFormatError(
                f"{path} is a zip file without .npy arrays in it",
                file=path,
                hint="what torch.save writes is a zip file too, and is read by the loader 'torch'",
            )
        others = {m.filename: "not a .npy array" for m in members if m not in arrays}
        return wl.Weights.describe(infos, skipped_files=others)

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a ``.npz`` file, or a folder with just one."""
        try:
            file = _find(Path(path), "*.npz")
        except SourceError as error:
            return wl.Probe.no(error.message)
        if file.suffix.lower() == ".npz" and zipfile.is_zipfile(file):
            return wl.Probe.yes(f"{file.name} is a .npz archive")
        return wl.Probe.no(f"{file.name} is no .npz archive")


def _is_the_systems(error: OSError) -> bool:
    """Whether an error is of reading, and says nothing of the archive.

    Of damaged data bz2 raises one without a number, and zipfile goes to places before the file's first byte.
    """
    return error.errno not in (None, errno.EINVAL)


def _find(path: Path, pattern: str) -> Path:
    if os.path.isfile(path):  # noqa: PTH113 -- `Path.is_file` fails for a name that is too long
        return path
    if not os.path.isdir(path):  # noqa: PTH112 -- `Path.is_dir` fails for a name that is too long
        raise SourceNotFoundError(f"there is no file or folder {path}", file=path)
    found = sorted(file for file in path.iterdir() if fnmatch.fnmatch(file.name, pattern) and file.is_file())
    if not found:
        raise SourceNotFoundError(f"{path} holds no {pattern}", file=path)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise AmbiguousSourceError(
            f"{path} holds several archives: {names}", file=path, hint="name the file, or give file_pattern"
        )
    return found[0]


def _describe(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> wl.TensorInfo:
    from numpy.lib import format as npy

    name = member.filename.removesuffix(".npy")
    where = {"file": str(path), "tensor": name}
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            # 3.0 exists for the field names of structured arrays alone.
            raise CheckpointFormatError(f"array {name!r} has format version {version}, not 1.0 or 2.0", **where)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, stored = read_header(file)
        begin = file.tell()
    dtype = _torch_dtype(stored, where)
    if min(shape, default=0) < 0 or member.file_size != begin + math.prod(shape) * stored.itemsize:
        raise CheckpointFormatError(
            f"array {name!r} of shape {list(shape)} in {stored} does not fit its {member.file_size} bytes", **where
        )
    if member.compress_type == zipfile.ZIP_STORED:
        extent = wl.Extent(
            path,
            _begin_of(path, member) + begin,
            byteorder="big" if stored.str.startswith(">") else "little",
            strides=tuple(accumulate(shape[:-1], mul, initial=1)) if is_fortran and shape else None,
        )
        return wl.TensorInfo(name, dtype, shape, (extent,))
    if member.compress_type != zipfile.ZIP_DEFLATED or member.file_size > _MAX_DEFLATE_RATIO * member.compress_size:
        raise CheckpointFormatError(f"array {name!r} is not compressed as numpy.savez_compressed does", **where)
    source = wl.Extent(path).source
    return wl.TensorInfo(name, dtype, shape, read=lambda: _unpack(path, member), sources=[source])


def _torch_dtype(stored: np.dtype, where: dict[str, str]) -> torch.dtype:
    import torch

    dtype = getattr(torch, stored.name, None) if stored.kind in "biufc" else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtypeError(
            f"array {where['tensor']!r} is stored as {stored}, which torch has no dtype for",
            **where,
            hint="save it as numbers, e.g. bfloat16 as float32; arrays of objects would need pickle",
        )
    return dtype


def _begin_of(path: Path, member: zipfile.ZipInfo) -> int:
    # The header before the member need not be as long as the directory at the end of the file has it.
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
    return member.header_offset + 30 + int(name_length) + int(extra_length)


def _unpack(path: Path, member: zipfile.ZipInfo) -> torch.Tensor:
    import torch
    from numpy.lib import format as npy

    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            array = npy.read_array(file, allow_pickle=False)
    except Exception as error:  # as above
        raise CheckpointFormatError(f"{member.filename} in {path} can't be unpacked: {error}", file=path) from error
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
