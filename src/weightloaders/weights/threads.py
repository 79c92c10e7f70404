"""A few threads for what is mostly waited for; and how many more of them a process can have."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")

#: What is waited for at once, at most: headers, requests.
IN_FLIGHT = 16

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
    threads = threads_that_fit(min(most, len(items))) if len(items) > 1 else 0
    if threads < 2:
        yield from map(work, items)
        return
    done = 0
    pool = ThreadPoolExecutor(threads, name)
    tasks: list[Future[R]] = []
    try:
        try:
            for item in items:
                tasks.append(pool.submit(work, item))  # noqa: PERF401 -- those before a failure are wanted
        except RuntimeError:
            # No more threads are to be had, and what was handed out last may find nobody to do it.
            pool.shutdown(cancel_futures=True)
        for task in tasks:
            if task.cancelled():
                break
            yield task.result()
            done += 1
    except BaseException:
        # Not waited for: who looks no further may leave this to the garbage collector, in one of these very threads.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    yield from map(work, items[done:])


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
    if not threads_that_fit(1):
        return call()
    outcome: Future[R] = Future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(result)
        except InvalidStateError:
            late(result)

    # Not one that the process waits for when it ends.
    threading.Thread(target=work, name="weightloaders-waiting", daemon=True).start()
    try:
        return outcome.result(seconds)
    finally:
        outcome.cancel()


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
