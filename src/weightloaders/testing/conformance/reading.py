"""Checks of when it is read and whose it is: names without values, ownership, closing."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import weightloaders as wl
from weightloaders.errors import SourceClosedError, UnknownTensorError
from weightloaders.testing.conformance.author import (
    Author,
    bits,
    expect,
    expect_all,
    expect_names,
    files_in,
    held_files,
    refusal,
    skip,
)
from weightloaders.testing.tiny import sample
from weightloaders.weights.source import FileSource
from weightloaders.weights.weights import as_catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# What belongs to the whole process: how it is asked for and set, and a value other than the usual one.
_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any]] = {
    "torch's random numbers": (
        lambda: torch.get_rng_state().tolist(),
        lambda s: torch.set_rng_state(torch.ByteTensor(s)),
        torch.Generator().manual_seed(7).get_state().tolist(),
    ),
    "Python's random numbers": (random.getstate, random.setstate, random.Random(7).getstate()),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "the number of torch's threads": (torch.get_num_threads, torch.set_num_threads, 2),
    "the working directory": (Path.cwd, os.chdir, "/"),
}


class Reading(Author):
    """Names come without values, tensors belong to whoever got them, and closing closes."""

    def test_names_come_without_reading_the_values(self, tmp_path: Path) -> None:
        """Opening, names, dtypes and shapes take a small part of a checkpoint's bytes."""
        if not self.lazy:
            skip("the loader declares that it reads everything (lazy = False)")
        dtype = self.usual_dtype
        (tmp_path / "warm-up").mkdir()
        (tmp_path / "measured").mkdir()
        # What is imported on first use is not to be counted.
        self.open(self.write_checkpoint(tmp_path / "warm-up", self.some_tensors())).close()
        tensors = {f"t{i}": sample(dtype, (1024, 2048 // dtype.itemsize), i) for i in range(4)}
        source = self.write_checkpoint(tmp_path / "measured", tensors)
        total = sum(tensor.nbytes for tensor in tensors.values())
        with _counting_reads() as bytes_read:
            weights = self.open(source)
            expect_names(weights, tensors)
            expect(len(weights) == len(tensors), "len() is not the number of tensors")
            expect("t0" in weights and "no such tensor" not in weights, "`in` does not tell which tensors there are")
            for info in weights.infos():
                due = tensors[info.name]
                expect(
                    (info.dtype, info.shape) == (due.dtype, tuple(due.shape)),
                    f"{info.name!r} is catalogued as {list(info.shape)} {info.dtype}",
                )
            count = bytes_read()
        expect(
            count < total / 4,
            f"opening read {count:,} of {total:,} bytes: describe the tensors (`Weights.describe`) and read them when "
            "they are asked for",
        )
        with weights:
            self._values_are_of_now(tmp_path / "measured", weights, tensors)

    def _values_are_of_now(self, folder: Path, weights: wl.Weights, tensors: dict[str, torch.Tensor]) -> None:
        """Change the values in the file, in place: what was read before would now be seen to be old."""
        name, tensor = next(iter(tensors.items()))
        place = _find(folder, bits(tensor))
        if place is None:
            return
        path, offset = place
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(tensor.nbytes))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.files_changed(folder)

        def read() -> None:
            expect(
                bits(weights[name]) != bits(tensor),
                f"the values of {name!r} were read when the source was opened, and are kept in memory",
            )

        with contextlib.suppress(wl.errors.WeightLoadersError):  # that the file is another one is a good answer too
            read()

    def test_a_replaced_checkpoint_is_read_anew(self, tmp_path: Path) -> None:
        """Opened again, a source says what is there now, and not what was read from its path before."""
        for seed in (0, 100):
            folder = tmp_path / "checkpoint"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            tensors = {
                name: sample(tensor.dtype, tensor.shape, seed + i)
                for i, (name, tensor) in enumerate(self.some_tensors().items())
            }
            with self.open(self.write_checkpoint(folder, tensors)) as weights:
                expect_all(weights, tensors)

    def test_paths_of_all_kinds_are_read(self, tmp_path: Path) -> None:
        """Folders may be named with spaces, signs and letters of any alphabet, and paths may be relative."""
        folder = tmp_path / "Größe 权重 #1%20"
        folder.mkdir()
        tensors = self.some_tensors()
        source = str(self.write_checkpoint(folder, tensors))
        sources = [source]
        if Path(source).is_relative_to(tmp_path):
            sources.append(str(Path(source).relative_to(tmp_path)))
        with contextlib.chdir(tmp_path):
            for path in sources:
                error = refusal(partial(self._expect_read, path, tensors))
                expect(error is None, f"the path {path!r} is not read: {error}")

    def _expect_read(self, path: str, tensors: dict[str, torch.Tensor]) -> None:
        with self.open(path) as weights:
            expect_all(weights, tensors)

    def test_nothing_else_in_the_process_changes(self, tmp_path: Path) -> None:
        """Reading draws no random numbers, sets nothing for others, goes to no other folder and prints nothing."""
        source = self.write_checkpoint(tmp_path, self.some_tensors())
        before = {what: get() for what, (get, _, _) in _STATE.items()}
        printed = io.StringIO()
        changed: dict[str, None] = {}
        try:
            # Whoever sets what is usual changes something only where it was not.
            for unusual in (False, True):
                if unusual:
                    for _, put, other in _STATE.values():
                        put(other)
                found = {what: get() for what, (get, _, _) in _STATE.items()}
                with contextlib.redirect_stdout(printed), self.open(source) as weights:
                    dict(weights.items())
                changed |= {what: None for what, (get, _, _) in _STATE.items() if get() != found[what]}
        finally:
            for what, (_, restore, _) in _STATE.items():
                restore(before[what])
        expect(not changed, f"reading changed {', '.join(changed)}")
        expect(not printed.getvalue(), f"reading printed {printed.getvalue()!r}: use logging")

    def test_a_name_that_is_not_there_is_an_error_of_ours(self, tmp_path: Path) -> None:
        """Asking for a tensor that is not there names it."""
        with self.open(self.write_checkpoint(tmp_path, self.some_tensors())) as weights:
            error = refusal(lambda: weights["no such tensor"])
        expect(isinstance(error, UnknownTensorError), f"a name that is not there was no UnknownTensorError: {error!r}")

    def test_tensors_stay_as_they_are_while_others_are_read(self, tmp_path: Path) -> None:
        """No buffer is reused for what was handed out, unless the loader declares `borrowed`."""
        tensors = {f"t{i}": sample(self.usual_dtype, (64, 64), i) for i in range(8)}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            _expect_kept(weights.items())
            _expect_kept((name, weights[name]) for name in [*tensors, *tensors])

    def test_writing_into_a_tensor_changes_nothing_else(self, tmp_path: Path) -> None:
        """A tensor that was handed out is its owner's: neither the source nor what is read later changes with it."""
        tensors = self.some_tensors()
        source = self.write_checkpoint(tmp_path, tensors)
        before = _contents(tmp_path)
        with self.open(source) as weights:
            for name in tensors:
                tensor = weights[name]
                expect(_is_writable(tensor), f"the memory of {name!r} is read-only: writing into it ends the process")
                tensor.fill_(1)
            expect_all(weights, tensors)
        expect(_contents(tmp_path) == before, "reading, or writing into a tensor, changed the files")
        with self.open(source) as weights:
            expect_all(weights, tensors)

    def test_files_that_are_listed_are_read_as_those_on_disk(self, tmp_path: Path) -> None:
        """`get_listed_weights` and `probe_listing`, where the loader has them, say the same as for a path."""
        tensors = self.some_tensors()
        source = self.write_checkpoint(tmp_path, tensors)
        loader = self.created_loader(str(source))
        if type(loader).get_listed_weights is wl.BaseWeightLoader.get_listed_weights or "://" in str(source):
            skip("the loader does not read files that are listed")
        place = Path(source)
        listing, name = (place, "") if place.is_dir() else (place.parent, place.name)
        with as_catalogue(loader.get_listed_weights(wl.FolderListing(listing), name)) as weights:
            expect_all(weights, tensors)
        asked, listed = loader.probe(str(source)), loader.probe_listing(wl.FolderListing(listing), name)
        same = getattr(asked, "answer", None) == listed.answer
        expect(same, f"`probe` says {asked}, but `probe_listing` {listed}")

    def test_tensors_outlive_closing(self, tmp_path: Path) -> None:
        """A tensor that was handed out is still good when the weights are closed and gone."""
        tensors = self.some_tensors()
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            read = dict(weights.items())
        del weights
        gc.collect()
        expect_all(read, tensors)

    def test_closing_twice_is_harmless_and_reading_afterwards_an_error_of_ours(self, tmp_path: Path) -> None:
        """Closed before anything was read, and again: names remain, values are refused."""
        tensors = self.some_tensors()
        weights = self.open(self.write_checkpoint(tmp_path, tensors))
        for _ in range(2):
            expect(refusal(weights.close) is None, "closing raised an error")
        expect_names(weights, tensors)
        error = refusal(lambda: weights[next(iter(tensors))])
        expect(isinstance(error, SourceClosedError), f"reading closed weights was no SourceClosedError: {error!r}")

    def test_closing_in_the_middle_ends_the_stream(self, tmp_path: Path) -> None:
        """Whoever closes while `items()` is under way gets an error of ours, and not a hang or a crash."""
        weights = self.open(self.write_checkpoint(tmp_path, self.some_tensors()))
        stream = iter(weights.items())
        next(stream)
        weights.close()
        expect(isinstance(refusal(lambda: list(stream)), SourceClosedError), "the stream went on after closing")

    def test_closing_lets_go_of_the_files(self, tmp_path: Path) -> None:
        """No descriptor and no mapping of the files is left once the weights are closed and the tensors gone."""
        tensors = self.some_tensors()
        source = self.write_checkpoint(tmp_path, tensors)
        weights = self.open(source)
        for name in tensors:
            weights[name]
        weights.close()
        del weights
        gc.collect()
        held = held_files(tmp_path)
        expect(not held, f"after closing, these files are still open or mapped: {held}")


@contextlib.contextmanager
def _counting_reads() -> Iterator[Callable[[], int]]:
    """Count the bytes that this process reads: as the system does, or, where it does not, those of `ByteSource`."""
    counter = Path("/proc/self/io")
    if counter.exists():

        def total() -> int:
            return int(counter.read_text().split()[1])

        start = total()
        yield lambda: total() - start
        return
    count = 0
    read_into = FileSource.read_into

    def counted(self: FileSource, view: memoryview, offset: int) -> None:
        nonlocal count
        count += len(view)
        read_into(self, view, offset)

    FileSource.read_into = counted  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        FileSource.read_into = read_into  # type: ignore[method-assign]


def _find(folder: Path, content: bytes) -> tuple[Path, int] | None:
    for path in files_in(folder):
        offset = path.read_bytes().find(content)
        if offset >= 0:
            return path, offset
    return None


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """What the files hold, and when they were last written."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files_in(folder)}


def _expect_kept(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fail if a tensor has other values when all are read than it had when it came."""
    __tracebackhide__ = True
    held = [(name, tensor, bits(tensor)) for name, tensor in pairs]
    changed = [name for name, tensor, before in held if bits(tensor) != before]
    expect(
        not changed,
        f"later reads changed tensors that were handed out before: {changed}. A loader that reuses a buffer says so: "
        "borrowed = True",
    )


def _is_writable(tensor: torch.Tensor) -> bool:
    maps = Path("/proc/self/maps")
    if not maps.exists() or not tensor.numel():
        return True
    address = tensor.data_ptr()
    for line in maps.read_text(errors="replace").splitlines():
        span, permissions = line.split(" ", 2)[:2]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return "w" in permissions
    return True
