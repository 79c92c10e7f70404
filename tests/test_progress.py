"""Progress and reports, for people: a bar on a terminal, a few lines elsewhere, one switch for off."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from weightloaders import LoadReport, load_into, open_weights, plan_load
from weightloaders.errors import ConfigError
from weightloaders.progress import Progress
from weightloaders.report import bytes_text
from weightloaders.transfer.engine import ProgressEvent

if TYPE_CHECKING:
    from pathlib import Path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(option: Any, total: int = 1000) -> str:
    """What a load of 500 small steps writes to stderr."""
    with Progress(option) as progress:
        for done in range(501):
            progress(ProgressEvent(done * 2, total, "f"))
    return sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("RANK", "LOCAL_RANK", "WEIGHTLOADERS_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, "weightloaders")


def test_a_terminal_shows_a_bar_in_bytes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    text = shown(None)
    assert "Loading weights" in text
    assert "B/s" in text
    assert caplog.records == []


def test_a_bar_names_the_file_that_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(None) as progress:
        for done, file in enumerate(["/models/a.safetensors", "https://host/models/b.safetensors"]):
            progress(ProgressEvent(done, 2, file))
            progress._bar.refresh()
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "a.safetensors" in text
    assert "b.safetensors" in text
    assert "/models" not in text


def test_a_log_line_tells_how_fast_it_goes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(None) as progress:
        progress(ProgressEvent(3_000_000, 3_000_000, "f", seconds=1.5))
    assert [record.getMessage() for record in caplog.records] == ["loaded 3.0 MB of 3.0 MB, 2.0 MB/s"]


def test_a_bar_without_a_total_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    text = shown(None, total=0)
    assert "Loading weights" in text
    assert "%" not in text


def test_a_log_file_gets_a_few_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert shown(None) == ""
    assert [record.getMessage() for record in caplog.records] == [
        "loaded 250 B of 1.0 kB", "loaded 500 B of 1.0 kB", "loaded 750 B of 1.0 kB", "loaded 1.0 kB of 1.0 kB",
    ]  # fmt: skip


def test_a_program_without_a_console_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    for option in (None, True):
        with Progress(option) as progress:
            progress(ProgressEvent(1, 2))


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("LOCAL_RANK", "3"), ("WEIGHTLOADERS_PROGRESS", "0")])
@pytest.mark.parametrize("option", [None, True])
def test_other_ranks_and_the_switch_are_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str, option: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv(name, value)
    assert shown(option) == ""
    assert caplog.records == []


def test_false_is_silent_and_true_is_a_bar_anywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shown(False) == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert "Loading weights" in shown(True)
    assert caplog.records == []


def test_a_function_gets_every_event_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("RANK", "1")
    events: list[ProgressEvent] = []
    assert shown(events.append) == ""
    assert len(events) == 501


def test_anything_else_is_refused_before_the_model_is_touched() -> None:
    with pytest.raises(ConfigError, match="progress='yes'"):
        load_into(nn.Linear(1, 1), {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}, progress="yes")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (269030016, "269.0 MB"), (5.5e9, "5.5 GB"), (2.5e15, "2500.00 TB")],
)
def test_bytes_are_told_in_decimal_units(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_a_report_is_a_table_for_people_and_data_for_programs() -> None:
    report = LoadReport(
        loaded=[f"w{i}" for i in range(20)], missing=["m"], cast={"w1": ("torch.float32", "torch.bfloat16")},
        warnings=["one", "two"], decided_by=["names"], loader="hf",
        bytes_read=2_000_000_000, seconds=2.0, extra_memory=8_000_000,
    )  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0].split() == ["tensors", "20", "loaded", "by", "hf"]
    assert "2,000,000,000 (2.0 GB)" in lines[1]
    assert "1.00 GB/s" in lines[2]
    assert [line for line in lines if line.startswith("warning")] == ["warning       one", "warning       two"]
    # Nothing is said of what did not happen, and long lists are cut.
    assert "unexpected" not in str(report)
    assert max(map(len, lines)) < 120
    assert LoadReport().bytes_per_second == 0
    assert json.loads(report.to_json())["cast"] == {"w1": ["torch.float32", "torch.bfloat16"]}


def test_a_report_tells_what_time_and_bytes_went_into(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(300, 300, bias=False), "b": nn.Linear(300, 300, bias=False).bfloat16()})
    torch.save({"a.weight": torch.randn(300, 300), "b.weight": torch.randn(300, 300)}, tmp_path / "w.pt")
    report = load_into(model, tmp_path / "w.pt", verify="finite")
    assert set(report.phases) == {"open", "plan", "prepare", "transfer", "verify"}
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert sum(report.phases.values()) <= report.seconds
    assert report.bytes_by_path == {"straight": 360_000, "buffered": 360_000}
    assert report.reads == 2
    told = str(report)
    assert "360.0 kB straight" in told
    assert "2 reads" in told
    assert "transfer 0." in told
    assert json.loads(report.to_json())["phases"].keys() == report.phases.keys()


def test_phases_are_those_of_the_last_load_alone(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, bias=False)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with open_weights(tmp_path / "w.pt") as weights:
        plan = plan_load(model, weights)
        first, second = plan.run(model), plan.run(model)
    assert "plan" not in first.phases
    assert second.phases["transfer"] <= second.seconds


@pytest.mark.parametrize("mode", ["direct", "o_direct", "stream"])
def test_progress_tells_the_rate_in_every_mode(tmp_path: Path, mode: Any) -> None:
    model = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(3))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    events: list[ProgressEvent] = []
    load_into(model, tmp_path / "w.pt", transfer=mode, progress=events.append)
    assert events[-1].done_bytes == 3 * 360_000
    assert events[-1].bytes_per_second > 0
    pairs = ((name, tensor.clone()) for name, tensor in model.state_dict().items())
    load_into(model, pairs, progress=events.append)
    assert events[-1].bytes_per_second > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_of_reads_past_the_page_cache_are_in_the_forecast(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(1000, 1000, bias=False, dtype=dtype)
    torch.save({"weight": torch.randn(1000, 1000)}, tmp_path / "w.pt")
    with open_weights(tmp_path / "w.pt") as weights:
        plan = plan_load(model, weights, transfer="o_direct")
        told, report = plan.forecast, plan.run(model)
    assert report.extra_memory <= told.extra_memory


def test_the_rate_of_a_report_is_that_of_the_transfer() -> None:
    report = LoadReport(bytes_read=2_000_000_000, seconds=4.0, phases={"prepare": 3.0, "transfer": 1.0})
    assert report.bytes_per_second == 2e9
