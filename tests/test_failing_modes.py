"""However bytes are moved, what fails on the way is an error of ours, and says what and where."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import ByteSource, Extent, TensorInfo, Weights, load_into, load_status
from weightloaders.errors import ConfigError, LoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MODES = ("direct", "mmap", "o_direct", "stream")
NAMES = tuple(f"{i}.weight" for i in range(4))


class Own(nn.Sequential):
    """A model that loads itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(*(nn.Linear(30, 20, bias=False) for _ in NAMES))


def remember(filled: nn.Sequential) -> None:
    for parameter in filled.parameters():
        parameter.before = parameter.detach().clone()  # type: ignore[attr-defined]


def is_untouched(filled: nn.Sequential, error: LoadError) -> None:
    """Or else it is marked, and what was changed is named."""
    changed = {n for n, p in filled.named_parameters() if not torch.equal(p, p.before)}  # type: ignore[attr-defined]
    assert changed <= set(error.written)
    assert load_status(filled) == ("failed" if error.written else None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({name: torch.randn(20, 30) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weightloaders")]


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
def test_a_progress_function_that_fails_is_named(file: Path, mode: Any, kind: type[nn.Sequential]) -> None:
    def progress(event: object) -> None:
        raise ValueError("no more")

    filled = model(kind)
    remember(filled)
    with pytest.raises(LoadError, match="no more") as caught:
        load_into(filled, file, transfer=mode, progress=progress)
    assert "progress function failed" in str(caught.value)
    is_untouched(filled, caught.value)


def test_a_progress_function_that_fails_on_a_stream_of_pairs_is_named() -> None:
    filled = model()
    pairs = ((name, torch.randn(20, 30)) for name in NAMES)
    with pytest.raises(LoadError, match="progress function failed: ValueError: no more"):
        load_into(filled, pairs, progress=lambda event: (_ for _ in ()).throw(ValueError("no more")))
    assert load_status(filled) == "failed"


class Failing(ByteSource):
    name = "a source of somebody else's"
    size = 1 << 20  # type: ignore[assignment]
    identity = 1  # type: ignore[assignment]

    def read_into(self, view: memoryview, offset: int) -> None:
        raise RuntimeError("the cable is loose")


def failing_read() -> torch.Tensor:
    raise RuntimeError("the cable is loose")


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["source", "read"])
def test_code_of_others_that_fails_while_reading_is_named_with_the_tensor(
    mode: Any, how: str, kind: type[nn.Sequential]
) -> None:
    source = Failing()
    infos = [
        TensorInfo(name, torch.float32, (20, 30), read=failing_read)
        if how == "read"
        else TensorInfo(name, torch.float32, (20, 30), Extent(source, 2400 * i))
        for i, name in enumerate(NAMES)
    ]
    filled = model(kind)
    remember(filled)
    with pytest.raises(LoadError, match="the cable is loose") as caught:
        load_into(filled, Weights.describe(infos), transfer=mode)
    assert caught.value.tensor in NAMES
    is_untouched(filled, caught.value)


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
def test_a_storage_that_there_is_none_of_is_refused_before_anything_changes(
    file: Path, mode: Any, kind: type[nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = model(kind)
    before = [parameter.detach().clone() for parameter in filled.parameters()]
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "floppy")
    with pytest.raises(ConfigError, match="floppy"):
        load_into(filled, file, transfer=mode)
    assert load_status(filled) is None
    assert all(torch.equal(a, b) for a, b in zip(before, filled.parameters(), strict=True))
