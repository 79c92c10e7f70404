"""Checks of reading by several at once: threads, and a process that was spawned."""

from __future__ import annotations

import contextlib
import importlib.machinery
import multiprocessing
import operator
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import weightloaders as wl
from weightloaders.errors import WeightLoadersError
from weightloaders.testing.conformance.author import Author, bits, expect, expect_same, skip, within
from weightloaders.testing.conformance.interleaving import Step, steps_of, take_turns
from weightloaders.testing.tiny import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import torch

_THREADS = 4
_ROUNDS = 3
# How often a thread that can't go on before another does is waited for.
_MOST_WAITS = 12
# Starting a process that imports torch takes its time on a busy machine.
_SECONDS_TO_START = 120.0


class Sharing(Author):
    """Several may read at once."""

    def test_several_threads_read_the_same_values(self, tmp_path: Path) -> None:
        """Threads that read from one `Weights` in different orders each get what was written."""
        tensors = {f"t{i}": sample(self.usual_dtype, (65, 129), i) for i in range(12)}
        source = self.write_checkpoint(tmp_path, tensors)
        with self.open(source) as weights:

            def read(names: list[str]) -> None:
                for name in names:
                    expect_same(name, weights[name], tensors[name], tensors)

            within(self.patience, lambda: _in_threads(read, tensors))

    def test_a_thread_reads_while_another_is_at_any_step(self, tmp_path: Path) -> None:
        """Whichever step of the loader's one thread has come to, another may read a tensor, or open and read, there."""
        tensors = {name: sample(self.usual_dtype, self.fitted((17, 9)), i) for i, name in enumerate(("t0", "t1"))}
        source = self.write_checkpoint(tmp_path, tensors)

        def opened_and_read() -> torch.Tensor:
            with self.open(source) as weights:
                return weights["t1"].clone()  # whether it outlives closing is another check's matter

        def read_in_turns(share: bool) -> None:
            end, in_vain = time.monotonic() + self.patience / 10, 0
            with self.open(source) as weights:
                weights["t0"]  # what is imported on first use is no step
                steps = steps_of(lambda: weights["t0"])
            for step in steps:
                # Opened anew, for a file may be opened, or a tensor kept, when the first is read.
                with self.open(source) as weights:
                    if share and weights.info("t0").read is not None:
                        return  # this library has one thread call that at a time
                    other = (lambda: weights["t1"]) if share else opened_and_read
                    in_vain += self._take_turns(lambda: weights["t0"], other, step, tensors)
                # Who takes a lock mostly holds it for all of its way.
                if in_vain > _MOST_WAITS or time.monotonic() > end:
                    return

        for share in (True, False):
            within(self.patience, partial(read_in_turns, share))

    def _take_turns(
        self,
        one: Callable[[], torch.Tensor],
        other: Callable[[], torch.Tensor],
        step: Step,
        tensors: Mapping[str, torch.Tensor],
    ) -> bool:
        __tracebackhide__ = True
        try:
            turns = take_turns(one, other, step)
            expect_same("t0", turns.one, tensors["t0"], tensors)
            if turns.other is not None:
                expect_same("t1", turns.other, tensors["t1"], tensors)
        except (AssertionError, WeightLoadersError) as error:
            raise AssertionError(
                f"one thread read 't1' while another, that reads 't0', was at {step}; then: {error}"
            ) from error
        return turns.in_vain

    def test_several_threads_open_the_same_source(self, tmp_path: Path) -> None:
        """Threads that each open the source, and close it while others read, do not disturb each other."""
        tensors = {f"t{i}": sample(self.usual_dtype, (33, 17), i) for i in range(6)}
        source = self.write_checkpoint(tmp_path, tensors)

        def read(names: list[str]) -> None:
            with self.open(source) as weights:
                for name in names:
                    expect_same(name, weights[name], tensors[name], tensors)

        within(self.patience, lambda: _in_threads(read, tensors))

    def test_a_spawned_process_reads_the_same_values(self, tmp_path: Path) -> None:
        """A worker that shares nothing with this process, and has not registered anything, reads the same."""
        loader = target_of(self.given_loader)
        if loader is None:
            skip("the loader is known in this process alone: it is not defined in a module that can be imported")
        tensors = self.some_tensors()
        source = self.write_checkpoint(tmp_path, tensors)
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        worker = context.Process(target=_work, args=(answers, str(source), loader, dict(self.options)), daemon=True)
        worker.start()
        worker.join(_SECONDS_TO_START)
        if worker.is_alive():
            worker.kill()
            raise AssertionError(f"the spawned process did not end within {_SECONDS_TO_START:g} seconds")
        expect(not answers.empty(), f"the spawned process ended with {worker.exitcode}")
        found = answers.get()
        expected = {name: bits(tensor) for name, tensor in tensors.items()}
        expect(found == expected, f"the spawned process read something else: {found}")


def target_of(loader: Any) -> str | None:
    """How another process names this loader: its name, or ``"package.module:Class"``; None if it can't import it."""
    if isinstance(loader, str):
        return loader
    kind = type(loader) if isinstance(loader, wl.BaseWeightLoader) else loader
    name, module = getattr(kind, "__qualname__", "<locals>"), getattr(kind, "__module__", "__main__")
    # A class that was made in a function is no attribute of the module that it names.
    with contextlib.suppress(AttributeError):
        if operator.attrgetter(name)(sys.modules.get(module)) is kind and _is_importable(module):
            return f"{module}:{name}"
    return None


def _is_importable(module: str) -> bool:
    """Whether a new process finds this module: a runner of tests may have imported it from just anywhere."""
    path = None
    spec = None
    for depth in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None


def _work(answers: Any, source: str, loader: str, options: Mapping[str, Any]) -> None:
    try:
        with wl.open_weights(source, loader, **options) as weights:
            answers.put({name: bits(tensor) for name, tensor in weights.items()})
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")
        raise


def _in_threads(read: Callable[[list[str]], None], every_name: Iterable[str]) -> None:
    """Have several threads read all of the names, several times, each in an order of its own."""
    start = threading.Barrier(_THREADS)

    def work(seed: int) -> None:
        dice, names = random.Random(seed), list(every_name)
        start.wait()
        for _ in range(_ROUNDS):
            dice.shuffle(names)
            read(names)

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(work, seed) for seed in range(_THREADS)]:
            done.result()
