"""`NpzLoader`: says what a NumPy ``.npz`` archive holds, and where in the file it lies.

An archive is a zip file with one ``.npy`` member an array. A member is a short header and then the values; where the
zip file stores it uncompressed, as ``numpy.savez`` does, the values can be read from their place in the archive.
The formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and section 4.3 of
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import fnmatch
import io
import math
import zipfile
import zlib
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

# Its names are resolved on first use. Like torch and numpy below, they are not needed for listing the loaders.
import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    SourceError,
    SourceNotFoundError,
    UnsupportedDtypeError,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from weightloaders.weights.zip_directory import Record

# Bytes of a member that hold its header: NumPy makes it 128 long for an array of a few dimensions.
_MAX_HEADER_BYTES = 2 << 10


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
        return self.get_listed_weights(*_listed(model_name_or_path))

    def get_listed_weights(self, listing: wl.Listing, name: str = "") -> wl.Weights:
        """The same of a file wherever it lies."""
        from weightloaders.weights.zip_directory import read_directory

        source = _find(listing, name, self.file_pattern)
        members = [record for record in read_directory(source).values() if not record.name.endswith("/")]
        arrays = [record for record in members if record.name.endswith(".npy")]
        if members and not arrays:
            raise CheckpointFormatError(
                f"{source.name} is a zip file without .npy arrays in it",
                file=source.name,
                hint="what torch.save writes is a zip file too, and is read by the loader 'torch'",
            )
        begins = source.read_many([(array.offset, min(array.packed_size, _MAX_HEADER_BYTES)) for array in arrays])
        infos = [_describe(array, begin) for array, begin in zip(arrays, begins, strict=True)]
        others = {member.name: "not a .npy array" for member in members if not member.name.endswith(".npy")}
        return wl.Weights.describe(infos, skipped_files=others)

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a ``.npz`` file, or a folder with just one."""
        try:
            return cls.probe_listing(*_listed(path))
        except SourceError as error:
            return wl.Probe.no(error.message)

    @classmethod
    def probe_listing(cls, listing: wl.Listing, name: str = "") -> wl.Probe:
        """The same of a file wherever it lies."""
        from weightloaders.weights.source_file import SourceFile
        from weightloaders.weights.zip_directory import ZIP_MAGIC

        try:
            source = _find(listing, name, "*.npz")
            if source.name.lower().endswith(".npz"):
                begin = source.read(0, min(len(ZIP_MAGIC), source.size))
                # It may also lie behind other bytes.
                if begin == ZIP_MAGIC or zipfile.is_zipfile(SourceFile(source)):
                    return wl.Probe.yes("a .npz archive")
        except SourceError as error:
            return wl.Probe.no(error.message)
        return wl.Probe.no(f"{source.name} is no .npz archive")


def _listed(path: str) -> tuple[wl.FolderListing, str]:
    from weightloaders.weights.files import listed
    from weightloaders.weights.folder import path_of

    return listed(path_of(path))


def _find(listing: wl.Listing, name: str, pattern: str) -> wl.ByteSource:
    if name:
        return listing.open(name)
    found = sorted(file for file in listing.names if fnmatch.fnmatch(file, pattern))
    if not found:
        raise SourceNotFoundError(f"{listing.where} holds no {pattern}", file=listing.where)
    if len(found) > 1:
        raise AmbiguousSourceError(
            f"{listing.where} holds several archives: {', '.join(found)}",
            file=listing.where,
            hint="name the file, or give file_pattern",
        )
    return listing.open(found[0])


def _describe(member: Record, begin: bytes) -> wl.TensorInfo:
    name, source = member.name.removesuffix(".npy"), member.source
    where = {"file": source.name, "tensor": name}
    shape, is_fortran, stored, length = _header(member, begin, where)
    dtype = _torch_dtype(stored, where)
    if min(shape, default=0) < 0 or member.size != length + math.prod(shape) * stored.itemsize:
        raise CheckpointFormatError(
            f"array {name!r} of shape {list(shape)} in {stored} does not fit its {member.size} bytes", **where
        )
    if member.deflated:
        unpack = partial(_unpack, member, length, stored, shape, is_fortran)
        return wl.TensorInfo(name, dtype, shape, read=unpack, sources=[source])
    extent = wl.Extent(
        source,
        member.offset + length,
        byteorder="big" if stored.str.startswith(">") else "little",
        strides=tuple(accumulate(shape[:-1], mul, initial=1)) if is_fortran and shape else None,
    )
    return wl.TensorInfo(name, dtype, shape, (extent,))


def _header(member: Record, begin: bytes, where: dict[str, str]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, whether it is in Fortran order, dtype, and how long the header is that says so."""
    from numpy.lib import format as npy

    try:
        if member.deflated:
            begin = zlib.decompressobj(-zlib.MAX_WBITS).decompress(begin, _MAX_HEADER_BYTES)
        file = io.BytesIO(begin)
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            # 3.0 exists for the field names of structured arrays alone.
            raise CheckpointFormatError(
                f"array {where['tensor']!r} has format version {version}, not 1.0 or 2.0", **where
            )
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        return (*read_header(file), file.tell())
    except CheckpointFormatError:
        raise
    except MemoryError:
        # Python's parser says so of brackets within brackets. No memory is lacking: numpy reads none but short headers.
        pass
    except Exception as error:  # a header that is none makes numpy raise all kinds
        raise CheckpointFormatError(
            f"array {where['tensor']!r} in {where['file']} has no header that can be understood: {error}",
            **where,
            hint="the file is damaged, or the array is none of numbers",
        ) from error
    raise CheckpointFormatError(
        f"array {where['tensor']!r} in {where['file']} has a header that is nested too deeply",
        **where,
        hint="the file is damaged, or made to do harm",
    )


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


def _unpack(member: Record, begin: int, stored: np.dtype, shape: tuple[int, ...], is_fortran: bool) -> torch.Tensor:
    import numpy as np
    import torch

    array = np.ndarray(shape, stored, member.read(member.size), begin, order="F" if is_fortran else "C")
    return torch.from_numpy(np.require(array, stored.newbyteorder("="), ["ALIGNED", "WRITEABLE"]))
