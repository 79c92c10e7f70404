"""Checks of bad input: truncated, missing, empty, garbage, hostile. Only errors of ours may come out, and soon."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightloaders.errors import SourceError, WeightLoadersError
from weightloaders.testing.conformance.author import Author, bits, expect, files_in, held_files, refusal, within
from weightloaders.weights.reading import lacks_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What a load of a few kilobytes may take beyond what the process has.
_SPARE_MEMORY = 1 << 30
_TRUNCATIONS = 32
_FLIPS = 96

Found = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]
# Reads a checkpoint whose file has this content; what comes of it, and what came of it when it was sound.
Attempt = Callable[[bytes], tuple[Found | WeightLoadersError, Found]]


class Damage(Author):
    """Whatever lies in the files, it is read, or refused by a `WeightLoadersError`: no hang, no huge allocation."""

    def test_a_missing_source_is_named(self, tmp_path: Path) -> None:
        """A path that leads nowhere is a `SourceError` that names it, and can be sent to another process."""
        source = self.write_checkpoint(tmp_path, self.some_tensors())
        for path in files_in(tmp_path):
            path.unlink()
        self.files_changed(tmp_path)
        error = self._attempt(source)
        expect(isinstance(error, SourceError), f"files that are gone were no SourceError: {error!r}")
        expect(
            Path(str(source)).name in str(error) or tmp_path.name in str(error),
            f"the error does not name what is missing: {error}",
        )
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
        expect(str(again) == str(error), f"the error does not survive pickling: {again!r}")

    def test_an_empty_folder_is_refused(self, tmp_path: Path) -> None:
        """A folder without files has no weights, and one without any tensors is no success either."""
        error = self._attempt(tmp_path)
        expect(isinstance(error, WeightLoadersError), f"an empty folder was read as weights: {error}")

    def test_empty_files_are_refused(self, tmp_path: Path) -> None:
        """A checkpoint of empty files is refused."""
        for path, _, attempt in self._each_file(tmp_path):
            self._expect_noticed("empty", path, attempt(b""), "an empty file")

    def test_a_checkpoint_without_tensors_is_read_or_refused(self, tmp_path: Path) -> None:
        """Nothing at all is weights without names, or an error of ours."""
        try:
            source = self.write_checkpoint(tmp_path, {})
        except Exception:  # noqa: BLE001 -- not every format can say nothing
            return
        found = self._attempt(source)
        expect(isinstance(found, WeightLoadersError) or not found, f"tensors came out of nothing: {found}")

    def test_truncated_files_are_refused(self, tmp_path: Path) -> None:
        """A file that ends early is noticed, wherever it ends."""
        for path, content, attempt in self._each_file(tmp_path):
            for length in _lengths(len(content)):
                found = attempt(content[:length])
                self._expect_noticed("truncated", path, found, f"a file cut to {length} of {len(content)} bytes")

    def test_garbage_is_refused(self, tmp_path: Path) -> None:
        """Files of another kind are refused: text, zeros, noise, an error page, another format's."""
        for path, content, attempt in self._each_file(tmp_path):
            for kind, garbage in _garbage(len(content)).items():
                self._expect_noticed("garbage", path, attempt(garbage), f"a file of {kind}")

    def test_errors_say_where(self, tmp_path: Path) -> None:
        """What is refused is named: a file or the source in the text, or a tensor in it or as ``tensor``."""
        for path, content, attempt in self._each_file(tmp_path):
            for damaged in (content[: len(content) // 2], b"this is no checkpoint\n"):
                error, sound = attempt(damaged)
                if isinstance(error, WeightLoadersError):
                    names = [path.name, str(tmp_path), *map(repr, sound)]
                    said = error.file or error.tensor or any(name in str(error) for name in names)
                    expect(said, f"{path.name} was refused, but the error names neither file nor tensor: {error}")

    def test_changed_bytes_never_end_in_a_foreign_exception(self, tmp_path: Path) -> None:
        """Whatever bytes are changed, it is read (as other values, maybe) or refused by an error of ours."""
        for _, content, attempt in self._each_file(tmp_path):
            for changed in _changed(content):
                attempt(changed)

    def test_code_in_a_file_is_not_run(self, tmp_path: Path) -> None:
        """A pickle in the place of a file, bare or as torch and NumPy wrap it, runs nothing."""
        mark = tmp_path / "it-ran"
        for path, _, attempt in self._each_file(tmp_path):
            for kind, content in _pickles(mark).items():
                attempt(content)
                expect(not mark.exists(), f"code in a file was run: {kind} in the place of {path.name}")

    def test_refused_files_are_let_go(self, tmp_path: Path) -> None:
        """No descriptor and no mapping of a file is left when it was refused."""
        before: set[str] | None = None
        for _, content, attempt in self._each_file(tmp_path):
            # What a sound file leaves behind is for another check.
            before = set(held_files(tmp_path)) if before is None else before
            attempt(content[: len(content) // 2])
        gc.collect()
        held = sorted(set(held_files(tmp_path)) - (before or set()))
        expect(not held, f"these files were refused, and are still open or mapped: {held}")

    def _attempt(self, source: str | Path) -> Found | WeightLoadersError:
        """Read everything, within bounds of time and memory; the tensors, or the error of ours."""
        found: Found = {}

        def read() -> None:
            with self.open(source) as weights:
                for name, tensor in weights.items():
                    found[name] = (tensor.dtype, tuple(tensor.shape), bits(tensor))

        with _bounded_memory():
            error = within(self.patience, lambda: refusal(read))
        link: BaseException | None = error
        while link is not None:
            expect(not lacks_memory(link), f"more than {_SPARE_MEMORY:,} bytes were asked for: {link}")
            link = link.__cause__
        return found if error is None else error

    def _each_file(self, folder: Path) -> Iterator[tuple[Path, bytes, Attempt]]:
        """Each file of a sound checkpoint with its content, and a way to read what comes of another content."""
        whole = folder / "sound"
        whole.mkdir()
        source = self.write_checkpoint(whole, self.some_tensors())
        sound = self._attempt(source)
        if isinstance(sound, WeightLoadersError):
            raise sound
        count = itertools.count()
        for path in files_in(whole):
            content = path.read_bytes()

            def attempt(damaged: bytes, path: Path = path, content: bytes = content) -> tuple[Any, Found]:
                if Path(str(source)).is_relative_to(whole):
                    # A place of its own, or a loader that remembers what was there before would not look.
                    place = folder / f"damaged-{next(count)}"
                    shutil.copytree(whole, place)
                    (place / path.relative_to(whole)).write_bytes(damaged)
                    self.files_changed(place)
                    return self._attempt(place / Path(str(source)).relative_to(whole)), sound
                try:
                    path.write_bytes(damaged)
                    self.files_changed(whole)
                    return self._attempt(source), sound
                finally:
                    path.write_bytes(content)
                    self.files_changed(whole)

            yield path, content, attempt

    def _expect_noticed(
        self,
        damage: Literal["empty", "truncated", "garbage"],
        path: Path,
        outcome: tuple[Found | WeightLoadersError, Found],
        what: str,
    ) -> None:
        found, sound = outcome
        # A file that the loader has no use for may be what it likes.
        if not isinstance(found, WeightLoadersError) and not self.may_go_unnoticed(damage, path):
            expect(found == sound, f"{what} in the place of {path.name} went unnoticed: it was read as {list(found)}")


def _lengths(size: int) -> list[int]:
    """Where a file is cut: near its ends, and evenly in between."""
    near = {1, 2, 4, 7, 8, 9, 16, 64, size - 1, size - 2, size - 8, size // 2}
    even = {size * i // _TRUNCATIONS for i in range(1, _TRUNCATIONS)}
    return sorted(length for length in near | even if 0 < length < size)


def _garbage(size: int) -> Mapping[str, bytes]:
    noise = random.Random(0)
    saved = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2), saved)
    return {
        "text": b"this is no checkpoint\n",
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "noise": noise.randbytes(size),
        "a web page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        "JSON": b'{"a.weight": 1, "b": [1, 2, {"c": null}]}',
        "a zip file without a directory": b"PK\x03\x04" + bytes(60),
        "a pickled module": saved.getvalue(),
        "deep JSON": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    }  # fmt: skip


def _changed(content: bytes) -> Iterator[bytes]:
    """The content with bytes changed: single bits, runs of ones as absurd sizes, parts left out or given twice."""
    dice = random.Random(0)
    # Headers are at the beginning, or at the end, and that is where damage is dangerous.
    places = [*range(min(48, len(content))), *range(max(48, len(content) - 48), len(content))]
    for at in places:
        yield content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]
    for _ in range(_FLIPS):
        at = dice.randrange(len(content))
        yield content[:at] + bytes([dice.randrange(256)]) + content[at + 1 :]
    for at in {*range(0, min(64, len(content)), 4), *(dice.randrange(len(content)) for _ in range(16))}:
        for size in (b"\xff" * 4, b"\xff" * 7 + b"\x7f", b"\x00" * 7 + b"\x10"):
            yield content[:at] + size + content[at + len(size) :]
    for _ in range(8):
        begin, end = sorted((dice.randrange(len(content)), dice.randrange(len(content))))
        yield content[:begin] + content[end:]
        yield content[:end] + content[begin:]


class _Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.mark), "w"))


def _pickles(mark: Path) -> Mapping[str, bytes]:
    trap = _Trap(mark)
    found = {"a bare pickle": pickle.dumps({"weight": trap})}
    for kind, is_zip in (("what torch.save writes", True), ("what torch.save wrote before 1.6", False)):
        saved = io.BytesIO()
        torch.save({"weight": trap}, saved, _use_new_zipfile_serialization=is_zip)
        found[kind] = saved.getvalue()
    with contextlib.suppress(ImportError):
        import numpy as np

        array = np.empty(1, dtype=object)
        array[0] = trap
        for kind, save in (("an array of objects", np.save), ("an archive with an array of objects", _save_archive)):
            saved = io.BytesIO()
            save(saved, array)
            found[kind] = saved.getvalue()
    return found


def _save_archive(file: io.BytesIO, array: object) -> None:
    import numpy as np

    np.savez(file, weight=array)  # type: ignore[arg-type]


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let an allocation fail that goes far beyond what the files can need; on Linux, which counts all of them."""
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        bound = in_use + _SPARE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(bound, soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    else:
        yield
