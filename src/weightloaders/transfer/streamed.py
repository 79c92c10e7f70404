"""Steps carried out with whole tensors, as these come: read ahead in the order of their files, or from their source.

The first is the mode ``stream``, the second the way of sources that have one of their own to read many tensors.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from weightloaders.errors import LoadError, WeightLoadersError
from weightloaders.plan import CallStep, CopyStep, Step, step_infos
from weightloaders.transfer.engine import ProgressEvent, Transfer, Transferred, how, tell
from weightloaders.transfer.foreign import place_of
from weightloaders.transfer.read_ahead import ReadAhead
from weightloaders.transfer.sources import check_unchanged, habits_for, sources_of
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.reading import read_tensor
from weightloaders.weights.supplied import Supplied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from weightloaders.transfer.options import TransferOptions


class StreamedTransfer:
    """Carries out steps, as `Transfer` does. A step that takes several tensors waits for the last of them.

    Args:
        steps: What to do.
        options: How.
        progress: Called after each tensor.
        handed: Told of each tensor that goes to foreign code.
        stream: The source's own way; see `weightloaders.Weights.describe`.
        borrowed: Whether the tensors that it hands out are reused.

    Attributes:
        written: Names of the parameters that were written to, however it ended.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        options: TransferOptions,
        progress: Callable[[ProgressEvent], object] | None = None,
        handed: Callable[[str, torch.Tensor], object] | None = None,
        stream: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]] | None = None,
        borrowed: bool = False,
    ) -> None:
        self._options, self._progress, self._handed = options, progress, handed
        self._stream, self._borrowed = stream, borrowed
        self._sources = sources_of(steps)
        self._result = Transferred(how={**how(options, habits_for(self._sources, options)), "mode": "stream"})
        self.written = self._result.written
        infos: dict[int, TensorInfo] = {}
        # By the identity of what is known of a tensor: the steps that take it, and of these how many are not done yet.
        self._takers: dict[int, list[Step]] = defaultdict(list)
        # By the identity of a step: how many of its tensors are not there yet.
        self._lacking: Counter[int] = Counter()
        for step in steps:
            needed = {id(info): info for info in step_infos(step)}
            infos.update(needed)
            self._lacking[id(step)] = len(needed)
            for key in needed:
                self._takers[key].append(step)
        self._users = {key: len(takers) for key, takers in self._takers.items()}
        self._infos = sorted(infos.values(), key=lambda info: place_of([info]))
        self._without = [step for step in steps if not step_infos(step)]
        self._there: dict[int, TensorInfo] = {}
        self._held = 0

    def run(self) -> Transferred:
        """Do all of it.

        Raises:
            LoadError: If anything fails; ``written`` names the parameters that were touched.
        """
        try:
            self._move(self._without)
            self._take_all()
            check_unchanged(self._sources)
        except WeightLoadersError as error:
            raise LoadError.of(error, self.written) from error
        if self._result.bytes_read:
            self._result.bytes_by_path = {"streamed": self._result.bytes_read}
        return self._result

    def _take_all(self) -> None:
        result, total = self._result, sum(info.bytes_stored for info in self._infos)
        source = (
            ReadAhead(self._infos, _own, self._options) if self._stream is None else Supplied(self._infos, self._stream)
        )
        # Who fails leaves threads behind that read ahead.
        with contextlib.closing(iter(source)) as tensors:
            for info, tensor in tensors:
                self._there[id(info)] = TensorInfo(info.name, info.dtype, info.shape, read=partial(_itself, tensor))
                # What is no longer needed gives its memory to the next.
                del tensor
                result.extra_memory = max(result.extra_memory, self._held + source.most_held)
                self._held += info.nbytes
                self._took(info)
                result.bytes_read += info.bytes_stored
                if self._progress is not None:
                    tell(self._progress, ProgressEvent(result.bytes_read, total, place_of([info])[0] or None))
        result.reads = source.reads

    def _took(self, info: TensorInfo) -> None:
        ready = []
        for step in self._takers[id(info)]:
            self._lacking[id(step)] -= 1
            if not self._lacking[id(step)]:
                ready.append(step)
        self._move([_with(step, self._there) for step in ready])
        for step in ready:
            for key in {id(used) for used in step_infos(step)}:
                self._users[key] -= 1
                if not self._users[key]:
                    self._held -= self._there.pop(key).nbytes
        if self._borrowed and id(info) in self._there:
            # It waits for others, and its source reads the next one into its memory.
            copy = read_tensor(self._there[id(info)]).detach().clone()
            self._there[id(info)] = TensorInfo(info.name, info.dtype, info.shape, read=partial(_itself, copy))

    def _move(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        transfer = Transfer(steps, options=self._options, handed=self._handed)
        try:
            moved = transfer.run()
        finally:
            self.written |= transfer.written
        self._result.infinities.extend(moved.infinities)
        # What the steps take is held here already, and was counted there once more.
        taken = sum({id(info): info.nbytes for step in steps for info in step_infos(step)}.values())
        self._result.extra_memory = max(self._result.extra_memory, self._held - taken + moved.extra_memory)


def _own(info: TensorInfo) -> torch.Tensor:
    """What its loader's `read` returns may still be the loader's, which reads the next one into it."""
    return read_tensor(info).detach().clone()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _with(step: Step, there: Mapping[int, TensorInfo]) -> Step:
    """The step with tensors that are in memory."""
    if isinstance(step, CopyStep):
        return replace(step, sources=tuple(there[id(info)] for info in step.sources))
    if isinstance(step, CallStep):
        return replace(step, info=there[id(step.info)])
    sources = tuple(
        tuple(there[id(info)] for info in source) if isinstance(source, tuple) else there[id(source)]
        for source in step.sources
    )
    return replace(step, sources=sources)
