"""Who reads what next: each file from front to back, as far as possible by one thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightloaders.transfer.job import Job


class Schedule:
    """Hands jobs out to threads.

    A thread stays with its file, so that the system's read-ahead sees one reader going forward. When its file is done
    it takes one that nobody reads. When there is none, it takes the second half of what another has left: two that go
    forward far from each other are each read ahead for, two that take turns in one place are not.

    Args:
        jobs: In the order of file and offset.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        files: dict[str, deque[Job]] = {}
        for job in jobs:
            files.setdefault(job.file, deque()).append(job)
        self._waiting = deque(files.values())
        self._taken: list[deque[Job]] = []
        self._lock = threading.Lock()

    def jobs(self) -> Iterator[Job]:
        """The jobs of one thread, each handed out when it is asked for."""
        own: deque[Job] = deque()
        while True:
            with self._lock:
                if not own:
                    own = self._waiting.popleft() if self._waiting else self._half()
                    self._taken.append(own)
                if not own:
                    return
                job = own.popleft()
            yield job

    def _half(self) -> deque[Job]:
        longest = max(self._taken, key=len, default=deque())
        half: deque[Job] = deque()
        for _ in range((len(longest) + 1) // 2):
            half.appendleft(longest.pop())
        return half
