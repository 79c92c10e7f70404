"""Mode ``mmap``: parameters become views of a file's private mapping, where its bytes are their values as they lie.

Nothing is read until it is used, and processes that load the same file share its memory. The mapping is copy on write:
what is written to a parameter never reaches the file.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError, SourceReadError
from weightloaders.plan import CopyStep, makes_up_its_target, single_run
from weightloaders.transfer.file_views import is_view_of_file, map_file, view_of
from weightloaders.transfer.memory import bump_versions, is_plain
from weightloaders.transfer.sources import check_unchanged
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightloaders.plan import Step
    from weightloaders.targets import Target


@dataclass(slots=True)
class Mapped:
    """What can be mapped instead of read. Nothing of the model is touched until `put_in`.

    Attributes:
        twins: By the identity of a parameter on meta, what is to be in its place.
        names: What is mapped. It needs nothing more.
        nbytes: Bytes of it.
        warnings: Why files could not be mapped, a sentence each.
        note: What is mapped, and why the rest is not, as a sentence.
    """

    twins: dict[int, torch.Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    nbytes: int = 0
    warnings: list[str] = field(default_factory=list)
    note: str = ""
    _sources: list[FileSource] = field(default_factory=list)
    _existing: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _views: list[tuple[FileSource, torch.Tensor]] = field(default_factory=list)

    def put_in(self) -> None:
        """Give parameters that have memory the file's instead. Each stays the same object."""
        with torch.inference_mode(False):
            for tensor, view in self._existing:
                tensor.data = view
        bump_versions(tensor for tensor, _ in self._existing)

    @torch.inference_mode(False)
    def let_go(self) -> None:
        """Give tensors memory of their own, without values, whose file is not what it was.

        Where a file was cut, the system ends a process that touches what was behind.
        """
        changed = {source for source in self._sources if not _is_unchanged(source)}
        for source, tensor in self._views:
            if source in changed:
                tensor.data = torch.zeros_like(tensor)

    def check_unchanged(self) -> None:
        """Raise `LoadError` if a file that is mapped is not what it was."""
        try:
            check_unchanged(self._sources)
        except SourceReadError as error:
            raise LoadError.of(error, self.names) from error


@torch.inference_mode(False)
def mapped(steps: Iterable[Step], device_of: Callable[[str], torch.device]) -> Mapped:
    """Map the files of these steps, where their bytes are what they are to be.

    Args:
        steps: The steps.
        device_of: Where a parameter that is on meta is to be.

    Raises:
        SourceReadError: If a file is not what it was.
    """
    result = Mapped()
    reasons: dict[str, int] = defaultdict(int)
    by_file: dict[tuple[str, object], list[tuple[CopyStep, FileSource, int]]] = defaultdict(list)
    for step in steps:
        found = _place(step, device_of)
        if isinstance(found, str):
            reasons[found] += 1
        else:
            by_file[found[1].name, found[1].identity].append(found)
    for places in by_file.values():
        source = places[0][1]
        end = max(offset + step.target.tensor.numel() * step.target.dtype.itemsize for step, _, offset in places)
        memory = map_file(source, end)
        if isinstance(memory, str):
            result.warnings.append(memory)
            reasons["their file can't be mapped"] += len(places)
            continue
        result._sources.append(source)  # noqa: SLF001 -- one module
        for step, _, offset in places:
            _add(result, source, step.target, view_of(memory, offset, step.target.dtype, step.target.shape))
    count = len(result.names)
    result.note = f"{count} parameter is mapped" if count == 1 else f"{count} parameters are mapped"
    if reasons:
        result.note += "; read: " + ", ".join(f"{count} ({why})" for why, count in reasons.items())
    return result


def _is_unchanged(source: FileSource) -> bool:
    try:
        source.check_unchanged()
    except SourceReadError:
        return False
    return True


def _add(result: Mapped, source: FileSource, target: Target, view: torch.Tensor) -> None:
    old = target.tensor
    result.names.add(target.name)
    result.nbytes += view.nbytes
    if not old.is_meta:
        result._existing.append((old, view))  # noqa: SLF001 -- one module
        result._views.append((source, old))  # noqa: SLF001 -- one module
        return
    new = torch.nn.Parameter(view, requires_grad=old.requires_grad) if type(old) is torch.nn.Parameter else view
    new.__dict__.update({**old.__dict__, **new.__dict__})
    result.twins[id(old)] = new
    result._views.append((source, new))  # noqa: SLF001 -- one module


def _place(step: Step, device_of: Callable[[str], torch.device]) -> tuple[CopyStep, FileSource, int] | str:
    """The file and the offset at which a target's bytes lie as they are to be, or why there is no such place."""
    if not isinstance(step, CopyStep):
        return "computed or handed over"
    tensor, dtype = step.target.tensor, step.target.dtype
    if len(step.sources) != 1 or len(step.placements) != 1:
        return "put together from parts"
    [info], [placed] = step.sources, step.placements
    extent = single_run(info)
    if extent is None or not isinstance(extent.source, FileSource):
        return "not one run of bytes in a file"
    if not placed.is_contiguous or not isinstance(placed.source, int):
        return "not in the order in which they lie"
    if not (extent.stored_dtype == info.dtype == dtype and extent.is_native):
        return "of another dtype or byte order"
    if not makes_up_its_target(step):
        return "not fitting"
    offset = extent.offset + placed.source_start * dtype.itemsize
    if offset % dtype.itemsize:
        return "not aligned"
    if (device_of(step.target.name) if tensor.is_meta else tensor.device).type != "cpu":
        return "not on the CPU"
    if not (is_plain(tensor) and tensor.is_contiguous() and tensor.numel()) or tensor.is_inference():
        return "of another kind of memory"
    if not _is_alone(tensor):
        return "sharing memory with others"
    return step, extent.source, offset


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else has a tensor's memory: it would not see the values that come into its place."""
    storage = tensor.untyped_storage()
    # Other processes may have what is shared, and other libraries what torch has not allocated itself.
    if storage.is_shared() or not (storage.resizable() or is_view_of_file(tensor)):
        return False
    # The tensor's own reference, and that of the name above.
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001 -- no public word for it
    return count is not None and count(storage._cdata) == 2  # noqa: SLF001 -- as above
