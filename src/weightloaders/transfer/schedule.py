"""Who reads what next: each file from front to back, as far as possible by one thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.transfer.job import Job


class Schedule:
    """Hands jobs out to threads.

    A thread stays with its file, so that the system's read-ahead sees one reader going forward. When its file is done
    it takes one that nobody reads; when there is none, it helps with the one that has most left.

    Args:
        jobs: In the order of file and offset.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        files: dict[str, deque[Job]] = {}
        for job in jobs:
            files.setdefault(job.file, deque()).append(job)
        self._waiting = deque(files.items())
        self._open: dict[str, deque[Job]] = {}
        self._lock = threading.Lock()

    def next(self, file: str | None) -> Job | None:
        """The next job of a thread that has just worked on this file; None when there is nothing left for it."""
        with self._lock:
            left = self._open.get(file) if file is not None else None
            if left is None:
                file, left = self._join()
            if left is None or file is None:
                return None
            job = left.popleft()
            if not left:
                del self._open[file]
            return job

    def _join(self) -> tuple[str | None, deque[Job] | None]:
        if self._waiting:
            file, left = self._waiting.popleft()
            self._open[file] = left
            return file, left
        if not self._open:
            return None, None
        return max(self._open.items(), key=lambda entry: len(entry[1]))
