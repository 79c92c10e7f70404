"""The benchmark's own ground: every way it times must give the reference's values, and a wrong one must be seen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import __main__ as peers
from benchmarks.peers import groups, running
from benchmarks.peers.checkpoints import write
from benchmarks.peers.measure import TINY
from benchmarks.peers.results import Results, judge
from benchmarks.peers.ways import OURS, SAFE_OPEN
from benchmarks.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = groups.Group("fused", (OURS, SAFE_OPEN))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The tiny fused workload, as a measurement and its warming up want it."""
    workload = WORKLOADS["fused"]
    for folder in ("fused", "tiny-fused"):
        write(workload, workload.sized(TINY), tmp_path / folder, ["safetensors"])
    return tmp_path


def test_all_ways_that_are_installed_give_equal_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--small", "--only", "warm, fresh", "--folder", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "The values are the reference's, in every way, each time." in output
    for workload in {group.workload for group in groups.GROUPS}:
        assert f"{workload}, warm, fresh: " in output
    assert not list(tmp_path.iterdir())


def test_wrong_values_are_seen(checkpoints: Path) -> None:
    file = next((checkpoints / "fused/safetensors").glob("*.safetensors"))
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name][-1, -1] += 1
    save_file(tensors, file)
    records = list(running.run_group_here(PLAIN, checkpoints, TINY))
    assert [len(record["wrong"]) for record in records] == [1, 1]
    results = Results(records)
    assert len(results.wrong) == 2
    assert [judged.reached for judged in judge(results, [PLAIN]) if judged.work == "values"] == [False]


def test_a_measurement_in_a_process_of_its_own(checkpoints: Path) -> None:
    records = list(running.run_group(PLAIN, checkpoints, TINY, 1, lambda text: None))
    assert [(r["round"], r["sampled"]) for r in records] == [(0, True)] * 2 + [(1, False)] * 2
    assert not any(record["wrong"] for record in records)
    results = Results(records)
    rows = {row.way: row for row in results.rows(PLAIN)}
    assert rows.keys() == {OURS, SAFE_OPEN}
    for row in rows.values():
        assert row.runs == 1
        assert row.seconds > 0
        assert row.extra is not None
        assert row.mapped is not None


def test_a_way_that_fails_is_told_and_not_tried_again(checkpoints: Path) -> None:
    for file in (checkpoints / "fused/safetensors").glob("*-00002-of-*"):
        file.write_bytes(file.read_bytes()[:100])
    records = list(running.run_group(PLAIN, checkpoints, TINY, 2, lambda text: None))
    assert len(records) == 2
    assert all("failed" in record for record in records)
    assert len(Results(records).failures) == 2


def test_figures_tables_and_chart_are_written_down(tmp_path: Path) -> None:
    arguments = ["--small", "--only", "f16", "--ways", OURS, "--ways", SAFE_OPEN, "--output", str(tmp_path / "out")]
    assert peers.main(arguments) == 0
    document: dict[str, Any] = json.loads((tmp_path / "out/results.json").read_text())
    assert {record["way"] for record in document["records"]} >= {OURS, SAFE_OPEN}
    assert document["machine"]["processors"] >= 1
    assert "| weightloaders |" in (tmp_path / "out/results.md").read_text()


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "raw"])
def test_what_peers_copy_into_covers_the_model_just_once(name: str) -> None:
    workload = WORKLOADS[name]
    layout = workload.sized(TINY)
    counts = {name: torch.zeros(made.shape, dtype=torch.int8) for name, made in layout.parameters.items()}
    for stored, shape in layout.stored.items():
        part = layout.parts[stored]
        view = part.view(counts[part.parameter])
        assert tuple(view.shape) == shape
        view += 1
    assert all((count == 1).all() for count in counts.values())
