"""A few threads for what is mostly waited for; and how many more of them a process can have."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import mmap
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")

#: What is waited for at once, at most: headers, requests.
IN_FLIGHT = 16
_PATIENCE = 0.2

# What a thread takes of the address space while it starts: a stack, of 8 MiB on most systems; 64 MiB, and for a moment
# twice that, which glibc reserves for what the thread allocates; and some memory of Python's.
_TAKEN_BY_A_THREAD = 160 << 20


def in_parallel(
    work: Callable[[T], R], items: Sequence[T], most: int = IN_FLIGHT, name: str = "weightloaders"
) -> list[R]:
    """The results of a function for each item, several of them waited for at once; see ``in_turn``."""
    return [*in_turn(work, items, most, name)]


def in_turn(
    work: Callable[[T], R], items: Sequence[T], most: int = IN_FLIGHT, name: str = "weightloaders"
) -> Iterator[R]:
    """The same, each result in its turn, as soon as it is there: so that it can be looked at while others are made.

    Where the system gives no threads, the caller's does it all. What fails ends the rest.

    Args:
        work: Called from several threads.
        items: What it is called with.
        most: How many threads, at most.
        name: What the threads are called.
    """
    waiting = deque(enumerate(items))
    news: SimpleQueue[tuple[int, Callable[[], R]]] = SimpleQueue()

    def work_off() -> None:
        with contextlib.suppress(IndexError):
            while True:
                at, item = waiting.popleft()
                try:
                    result = work(item)
                except BaseException as error:  # noqa: BLE001 -- raised where its result would come
                    waiting.clear()
                    news.put((at, functools.partial(_fail, error)))
                    return
                news.put((at, functools.partial(_identity, result)))

    threads = threads_that_fit(min(most, len(items))) if len(items) > 1 else 0
    crew = Crew(name)
    try:
        if threads < 2 or not crew.start(work_off, threads):
            yield from map(work, items)
            return
        done: dict[int, Callable[[], R]] = {}
        for at in range(len(items)):
            while at not in done:
                number, outcome = next_of(news)
                done[number] = outcome
            yield done.pop(at)()
    except BaseException:
        # Not waited for: who looks no further may leave this to the garbage collector, in one of these very threads.
        waiting.clear()
        raise
    crew.join()


def _identity(result: R) -> R:
    return result


def _fail(error: BaseException) -> NoReturn:
    raise error


def next_of(queue: SimpleQueue[T], seconds: float | None = None) -> T:
    """The next that is put into a queue; `queue.Empty` is raised if there is none within this time."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = _PATIENCE if end is None else min(_PATIENCE, max(0.0, end - time.monotonic()))
        try:
            # A wait with a limit lets Ctrl-C through on every system.
            return queue.get(timeout=left)
        except Empty:
            if end is not None and time.monotonic() >= end:
                raise


class Crew:
    """Threads whose caller Ctrl-C may interrupt at any moment; they see its context variables as they are at the start.

    What `threading.Condition`, and with it `concurrent.futures`, has a caller wait with is a lock that is taken within
    Python code: interrupted behind that, the caller does not know that it has it, nobody gives it back, and the thread
    that wants it next is waited for without end. A `queue.SimpleQueue` waits in one step.

    Args:
        name: What the threads are called.
        daemon: Whether the process may end without them.
    """

    def __init__(self, name: str, *, daemon: bool = False) -> None:
        self._name, self._daemon = name, daemon
        self._threads: list[threading.Thread] = []
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def start(self, work: Callable[[], object], threads: int) -> int:
        """Start threads that each call a function once.

        Returns:
            How many there are: fewer, where the system gives no more.
        """
        for number in range(threads):
            thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run, work),
                name=f"{self._name}_{number}",
                daemon=self._daemon,
            )
            # Before it runs, so that it is waited for also where Ctrl-C comes while it is started.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.pop()
                break
        return len(self._threads)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- raised by whoever waits
            self._ended.put(error)
        else:
            self._ended.put(None)

    def wait(self) -> None:
        """Wait until all have ended; what one of them raises is raised as soon as it is."""
        for _ in self._threads:
            error = next_of(self._ended)
            if error is not None:
                raise error
        self.join()

    def join(self, patience: float | None = None) -> None:
        """Wait until all have ended, so many seconds for each; a thread of the crew itself does not wait."""
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                _join(thread, patience)


def _join(thread: threading.Thread, patience: float | None) -> None:
    # One whose start was interrupted runs in a moment, or never.
    for _ in range(50):
        try:
            thread.join(patience)
            return
        except RuntimeError:
            time.sleep(0.01)


def interruptible(
    call: Callable[[], R], seconds: float | None = None, late: Callable[[R], object] = lambda _: None
) -> R:
    """What a call returns that itself looks neither for Ctrl-C nor at a clock: a thread of its own makes it.

    Args:
        call: What is waited for. It goes on where nobody waits for it any more.
        seconds: How long it is waited for.
        late: Given what the call returns when nobody waits for it any more.

    Raises:
        TimeoutError: If it takes longer.
    """
    news: SimpleQueue[Callable[[], R]] = SimpleQueue()
    # Whoever takes it out first decides: the thread that is done, or the caller that waits no longer.
    undecided = deque([None])

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            news.put(functools.partial(_fail, error))
            return
        try:
            undecided.pop()
        except IndexError:
            late(result)
        else:
            news.put(functools.partial(_identity, result))

    if not threads_that_fit(1) or not Crew("weightloaders-waiting", daemon=True).start(work, 1):
        return call()
    try:
        outcome = next_of(news, seconds)
    except BaseException as error:
        with contextlib.suppress(IndexError):
            undecided.pop()
        if isinstance(error, Empty):
            raise TimeoutError(f"not done within {seconds} seconds") from None
        raise
    return outcome()


def threads_that_fit(wanted: int) -> int:
    """How many threads there is address space for (``ulimit -v``): as many as are wanted, or fewer, or none.

    A thread that finds no memory while it starts ends without a word, and whoever started it waits for ever: so it goes
    in CPython.
    """
    fitting = wanted
    if sys.platform == "linux":
        while fitting and not _has_room(fitting * _TAKEN_BY_A_THREAD):
            fitting -= 1
    return fitting


if sys.platform == "linux":

    def _has_room(nbytes: int) -> bool:
        try:
            # What can't be written is not counted as memory that would have to be there.
            mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
        except (OSError, MemoryError):
            return False
        return True
