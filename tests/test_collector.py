"""Python's garbage collector is kept out of the way while plans are made and carried out, and always comes back."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from weightloaders import Convert, load_into
from weightloaders.errors import PlanError
from weightloaders.weights.collector import collector_paused, collector_resumed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_the_collector_is_away_while_bytes_move_and_is_back_afterwards(file: Path) -> None:
    seen = []
    load_into(torch.nn.Linear(2, 3, bias=False), file, progress=lambda _: seen.append(gc.isenabled()))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_the_collector_is_back_after_a_plan_that_was_refused(file: Path) -> None:
    with pytest.raises(PlanError):
        load_into(torch.nn.Linear(2, 4), file)
    assert gc.isenabled()


def test_the_collector_is_back_after_an_interrupt(file: Path) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_into(torch.nn.Linear(2, 3, bias=False), file, progress=interrupt)
    assert gc.isenabled()


def test_a_parameters_own_loader_runs_with_the_collector(file: Path) -> None:
    model, seen = torch.nn.Linear(2, 3, bias=False), []

    def weight_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
        seen.append(gc.isenabled())
        param.data.copy_(loaded)

    model.weight.weight_loader = weight_loader  # type: ignore[attr-defined]
    load_into(model, file)
    assert seen == [True]


def test_a_function_that_computes_runs_with_the_collector(file: Path) -> None:
    model, seen = torch.nn.Linear(2, 3, bias=False), []

    def halved(weight: torch.Tensor) -> torch.Tensor:
        if type(weight) is torch.Tensor and not weight.is_meta:
            seen.append(gc.isenabled())
        return weight / 2

    load_into(model, file, rules=[Convert("weight", "weight", halved)])
    assert seen == [True]
    assert gc.isenabled()


def test_who_had_switched_the_collector_off_finds_it_off(file: Path) -> None:
    model, seen = torch.nn.Linear(2, 3, bias=False), []
    model.weight.weight_loader = lambda param, loaded: (seen.append(gc.isenabled()), param.data.copy_(loaded))  # type: ignore[attr-defined]
    gc.disable()
    load_into(model, file)
    assert seen == [False]
    assert not gc.isenabled()


def test_of_several_pauses_at_once_the_last_to_end_brings_the_collector_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_outside_of_a_pause_there_is_nothing_to_resume() -> None:
    gc.disable()
    with collector_resumed():
        assert not gc.isenabled()
    assert not gc.isenabled()
