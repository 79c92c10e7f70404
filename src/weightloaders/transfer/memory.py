"""Parameter memory: of what kind it is, and advice to the kernel before it is touched for the first time."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Where Linux tells what the process has mapped, and how. Other systems have no such file.
_MAPPINGS = Path("/proc/self/maps")
# Where Linux tells of huge pages: https://docs.kernel.org/admin-guide/mm/transhuge.html. Other systems have none of it.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
# From the kernel's mman-common.h; Python's mmap names the first only where it was built for Linux, and not the second.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
# Memory is looked at in parts, so that a signal is seen between two.
_PART = 1 << 30


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and of torch's own classes, so that its memory is what it seems to be."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that only looks like one tensor, and holds others."""
    disabled = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001 -- no public word for it
    return type(tensor).__torch_dispatch__ is not disabled


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether bytes may be written straight into the tensor's memory."""
    return is_plain(tensor) and tensor.is_contiguous() and tensor.is_cpu and has_bytes(tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the memory of a plain tensor on the CPU holds its values as they are."""
    return (tensor.data_ptr() != 0 or tensor.numel() == 0) and not tensor.is_neg() and not tensor.is_conj()


def bump_versions(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that memory was written behind its back."""
    with torch.inference_mode(False):
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def first_unwritable(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor in memory that can't be written; None where there is none, or the system won't say.

    torch makes tensors of read-only arrays and mappings, and doesn't know it; what it has allocated itself is writable.
    """
    foreign = [
        (name, tensor) for name, tensor in tensors
        if tensor.is_cpu and is_plain(tensor) and tensor.numel() and not tensor.untyped_storage().resizable()
    ]  # fmt: skip
    if not foreign:
        return None
    try:
        lines = _MAPPINGS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    read_only = []
    for line in lines:
        span, permissions, *_ = line.split()
        if "w" not in permissions:
            start, end = (int(address, 16) for address in span.split("-"))
            read_only.append((start, end))
    starts = [start for start, _ in read_only]
    for name, tensor in foreign:
        at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
        if at >= 0 and tensor.data_ptr() < read_only[at][1]:
            return name
    return None


# ------------------------------------------------------------------ huge pages


def advise(tensors: Iterable[torch.Tensor]) -> int:
    """Ask for huge pages in the memory of tensors that are about to be filled; what they hold does not change.

    Touching fresh memory costs a page fault every 4 KiB, and those cost more than copying the bytes; with huge pages it
    is one every 2 MiB. Neighbours count as one piece of memory. Nothing is asked for memory that is not torch's own (a
    mapped file, shared memory, numpy's), nor where the system has no such thing.

    Args:
        tensors: Of any kind; those that have no memory of their own on the CPU are passed over.

    Returns:
        For how many bytes huge pages were granted; 0 where there are none.
    """
    huge = _huge_page()
    kernel = _Kernel.find() if huge else None
    if kernel is None:
        return 0
    # Held, so that nobody else gets their memory meanwhile. What torch may resize comes from its own allocator and is
    # private memory, unless it was moved to where other processes see it.
    storages = [
        storage
        for tensor in tensors
        if tensor.is_cpu and tensor.layout is torch.strided and not wraps_others(tensor)
        if (storage := tensor.untyped_storage()).resizable() and not storage.is_shared()
    ]
    granted = 0
    for start, end in _pieces((storage.data_ptr(), storage.nbytes()) for storage in storages):
        if end - start >= huge and kernel.advise(start, end, _MADV_HUGEPAGE) == 0:
            granted += end - start
            for begun in _begun(kernel, start, end, huge):
                if kernel.advise(*begun, _MADV_COLLAPSE) == errno.ENOMEM:
                    break
    return granted


def _huge_page() -> int:
    """The size of a huge page in bytes; 0 where the system gives none."""
    try:
        if "[never]" in (_HUGE_PAGES / "enabled").read_text():
            return 0
        return int((_HUGE_PAGES / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _pieces(memory: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The whole pages of pieces of memory (address, size); those between which there is no whole page are one piece."""
    page = mmap.PAGESIZE
    start = end = 0
    for address, size in sorted(memory):
        if end and address // page > (end - 1) // page + 1:
            yield -(-start // page) * page, end // page * page
            end = 0
        if not end:
            start = address
        end = max(end, address + size)
    yield -(-start // page) * page, end // page * page


def _begun(kernel: _Kernel, start: int, end: int, huge: int) -> Iterator[tuple[int, int]]:
    """Where huge pages would fit, but a few small ones are there already: the kernel would go on with small ones.

    An allocator writes a few bytes of its own before each piece that it hands out. So it is the first huge page's room
    of every large tensor, and all of it where tensors are smaller than a huge page.
    """
    pages = huge // mmap.PAGESIZE
    first, last = -(-start // huge) * huge, end // huge * huge
    for at in range(first, last, _PART):
        present = kernel.present(at, min(_PART, last - at))
        run = at
        for room in range(len(present) // pages):
            absent = present.count(0, room * pages, (room + 1) * pages)
            # Where it is mostly filled, copying what is there would cost more than it saves.
            if not pages * 3 // 4 <= absent < pages:
                if run < at + room * huge:
                    yield run, at + room * huge
                run = at + (room + 1) * huge
        if run < at + len(present) * mmap.PAGESIZE:
            yield run, at + len(present) * mmap.PAGESIZE


class _Kernel:
    """The two calls of the C library that are needed here."""

    def __init__(self, library: Any) -> None:
        self._madvise, self._mincore = library.madvise, library.mincore
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    @classmethod
    def find(cls) -> _Kernel | None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            return cls(ctypes.CDLL(None, use_errno=True))
        return None

    def advise(self, start: int, end: int, advice: int) -> int:
        """Give advice on whole pages; 0, or the number of the error."""
        return ctypes.get_errno() if self._madvise(start, end - start, advice) else 0

    def present(self, start: int, size: int) -> bytearray:
        """For each page a byte that is 0 if it is not in memory; empty where that can't be told."""
        result = bytearray(size // mmap.PAGESIZE)
        view = (ctypes.c_char * len(result)).from_buffer(result)
        return bytearray() if self._mincore(start, size, view) else result
