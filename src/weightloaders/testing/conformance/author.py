"""What an author gives the suite, and what all checks are made of."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

import weightloaders as wl
from weightloaders.errors import WeightLoadersError, summary
from weightloaders.loaders.headers_only import headers_only
from weightloaders.testing.tiny import DTYPES, sample
from weightloaders.weights.reading import memory_of
from weightloaders.weights.weights import as_catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import pytest
    import torch

_T = TypeVar("_T")

NAMES: tuple[str, ...] = (
    "w",
    "model.layers.0.self_attn.q_proj.weight",
    "..",
    ".hidden",
    "with space",
    "a/b\\c",
    "a:b:3,4",
    "Größe.权重.🙂",
    "e\u0301 is not \xe9",
    "UPPER",
    "upper",
    "0",
    "x" * 200,
    "module._private",
    "bn.num_batches_tracked",
)  # fmt: skip


class Author:
    """What an author gives: the loader, and a way to write a checkpoint in its format. See `LoaderConformance`."""

    loader: ClassVar[Any]
    options: ClassVar[Mapping[str, Any]] = {}
    dtypes: ClassVar[Collection[torch.dtype]] = DTYPES
    min_dims: ClassVar[int] = 0
    max_dims: ClassVar[int] = 8
    holds_empty: ClassVar[bool] = True
    names: ClassVar[Collection[str]] = NAMES
    lazy: ClassVar[bool] = True
    recognised: ClassVar[bool] = True
    patience: ClassVar[float] = 20.0
    heavy: ClassVar[Collection[str]] = ("torch", "transformers", "numpy")
    name: ClassVar[str | None] = None

    def write_checkpoint(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> str | Path:
        """Write tensors in the loader's format, if possible with other code than the loader's own.

        What the format can't hold is refused by any exception; nothing may be changed or left out.

        Args:
            folder: An empty folder.
            tensors: The tensors by name. Some may share memory.

        Returns:
            What the loader is asked to read, which may be a path in the folder or an address.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method write_checkpoint(self, folder, tensors)")

    def files_changed(self, folder: Path) -> None:
        """Called when the suite has changed files in the folder, e.g. to upload them again. Does nothing by default."""

    def may_go_unnoticed(self, damage: Literal["empty", "truncated", "garbage"], file: Path) -> bool:  # noqa: ARG002
        """Whether the format has nothing to tell this damage of a file by; False by default.

        A file that holds bare values can't be told from one of other values, for one.
        """
        return False

    # -- for the checks

    @property
    def given_loader(self) -> Any:
        """The loader as the author gave it: a function in a class would be bound otherwise."""
        loader = inspect.getattr_static(self, "loader", None)
        if loader is None:
            raise NotImplementedError(f"{type(self).__name__} needs an attribute `loader`")
        return loader.__func__ if isinstance(loader, staticmethod) else loader

    def open(self, source: str | Path) -> wl.Weights:
        """Open a source with the loader, as `open_weights` does; but what it raises is not made an error of ours."""
        loader = self.created_loader(str(source))
        with headers_only():
            return as_catalogue(loader.get_weights(str(source)), borrowed=loader.borrowed)

    def created_loader(self, source: str | None = None) -> wl.BaseWeightLoader:
        """The loader, created with the options of the suite."""
        given = self.given_loader
        options = {} if isinstance(given, wl.BaseWeightLoader) else self.options
        return wl.WeightLoaderRegistry.resolve(given, options, source=source)

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether the format can hold a tensor of this shape, by what is declared."""
        return self.min_dims <= len(shape) <= self.max_dims and (self.holds_empty or 0 not in shape)

    def fitted(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of as many elements whose number of dimensions the format can hold."""
        lacking = max(0, self.min_dims - len(shape))
        # The first dimensions are one, where there are too many.
        most = len(shape) - self.max_dims + 1
        return (math.prod(shape[:most]), *shape[most:]) if most > 1 else (*shape, *[1] * lacking)

    @property
    def usual_dtype(self) -> torch.dtype:
        """float32, or whatever else the format has."""
        return self.declared_dtypes[0]

    @property
    def declared_dtypes(self) -> list[torch.dtype]:
        """The dtypes that the format has, the usual ones first."""
        return [*(d for d in DTYPES if d in self.dtypes), *(d for d in self.dtypes if d not in DTYPES)]

    def some_tensors(self) -> dict[str, torch.Tensor]:
        """A few small tensors of the usual dtype, of shapes that the format can hold."""
        shapes: dict[str, tuple[int, ...]] = {"a.weight": (4, 8), "a.bias": (4,), "b": (2, 3, 4), "c": (1,)}
        return {name: sample(self.usual_dtype, self.fitted(shape), i) for i, (name, shape) in enumerate(shapes.items())}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: one test a dtype, be it declared or not."""
        for argument, dtypes in (
            ("dtype", self.declared_dtypes),
            ("undeclared_dtype", [d for d in DTYPES if d not in self.dtypes]),
        ):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, dtypes, ids=[str(d).removeprefix("torch.") for d in dtypes])


def expect(holds: object, message: str) -> None:
    """Fail the check with this message, unless something holds."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(message)


def skip(reason: str) -> NoReturn:
    """Skip the check."""
    import pytest

    pytest.skip(reason)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    dense = tensor.detach().contiguous()  # has to live as long as its memory is looked at
    return bytes(memory_of(dense))


def expect_same(
    name: str, tensor: torch.Tensor, expected: torch.Tensor, written: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Fail unless two tensors agree in dtype, shape and every bit.

    Args:
        name: What they are called.
        tensor: What was read.
        expected: What was written.
        written: All that was written, to tell whether one was read for another.
    """
    __tracebackhide__ = True
    said, due = f"{list(tensor.shape)} {tensor.dtype}", f"{list(expected.shape)} {expected.dtype}"
    expect(said == due, f"{name!r} was written as {due} and read as {said}")
    if bits(tensor) != bits(expected):
        alike = [other for other, values in (written or {}).items() if bits(values) == bits(tensor)]
        mixed = f"; all are those of {alike[0]!r}: is memory used again?" if alike and tensor.numel() > 1 else ""
        raise AssertionError(f"{name!r} is read otherwise than it was written: {_unlike(tensor, expected)}{mixed}")


def _unlike(tensor: torch.Tensor, expected: torch.Tensor) -> str:
    """How many elements differ, and the first of them."""
    import torch

    one, other = (t.detach().contiguous().reshape(-1) for t in (tensor, expected))
    size = one.element_size()
    differ = (one.view(torch.uint8).view(-1, size) != other.view(torch.uint8).view(-1, size)).any(1)
    first = int(differ.int().argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)] if tensor.dim() else []
    return f"{int(differ.sum()):,} of {one.numel():,} elements, the first at {place}, {other[first]} as {one[first]}"


def expect_all(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fail unless the weights are these, by name, dtype, shape and bit."""
    __tracebackhide__ = True
    expect_names(weights, expected)
    for name, tensor in expected.items():
        expect_same(name, weights[name], tensor, expected)


def expect_names(weights: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Fail unless the weights have these names."""
    __tracebackhide__ = True
    lost, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    expect(not lost and not extra, f"the names differ: lost {lost}, not written {extra}")


def refusal(function: Callable[[], object]) -> WeightLoadersError | None:
    """The library's error that a function raises; None if it raises nothing. Any other exception fails the check."""
    __tracebackhide__ = True
    try:
        function()
    except WeightLoadersError as error:
        return error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise AssertionError(
            f"a foreign exception came out, where only a WeightLoadersError may: {summary(error)}"
        ) from error
    return None


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """What a function returns or raises, if it does so in time; otherwise the check fails and says where it hangs."""
    __tracebackhide__ = True
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:  # noqa: BLE001 -- raised again where it was asked for
            outcome.extend((False, error))

    # A daemon: one that hangs for ever must not keep the tests from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 -- the documented way to another's stack
        where = "".join(traceback.format_stack(frame)) if frame else ""
        raise AssertionError(f"it hangs: nothing came back within {seconds:g} seconds. It is here:\n{where}")
    done, value = outcome
    if not done:
        raise value
    result: _T = value
    return result


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and below, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def held_files(folder: Path) -> list[str]:
    """Files in a folder that this process has open or mapped; on Linux, which tells."""
    within = str(folder.resolve())
    held = set()
    if Path("/proc/self/fd").exists():
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(str(link.readlink()))
        maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        held |= {line.split(None, 5)[5] for line in maps if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in held if path.startswith(within))
