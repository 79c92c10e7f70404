"""Progress and reports, for people: a bar on a terminal, a few lines elsewhere, one switch for off."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

from weightloaders import LoadReport, load_into
from weightloaders.errors import ConfigError
from weightloaders.progress import Progress
from weightloaders.report import bytes_text
from weightloaders.transfer.engine import ProgressEvent


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
