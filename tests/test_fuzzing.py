"""Hostile and broken input by the thousand, drawn from a seed; `make fuzz` is the same for longer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
TARGETS = [
    "safetensors", "torch-zip", "torch-legacy", "gguf", "raw", "npz", "dcp", "index", "plan", "config", "rules",
    "params",
]  # fmt: skip
EXECUTIONS = 100

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness needs Linux")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = [str(REPOSITORY), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_each_reader_refuses_in_our_own_words_or_reads_the_files_own_values(tmp_path: Path) -> None:
    done = run("-m", "fuzz", "--executions", str(EXECUTIONS), "--seed", "1", "--faults", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:-1] if not line.startswith(" ")}
    assert list(rows) == TARGETS
    for name, row in rows.items():
        executions, refused, loaded = (int(number.replace(",", "")) for number in row[1:4])
        assert (executions, int(row[-1])) == (EXECUTIONS, 0), name
        assert refused > 0, name
        assert loaded > 0, name
        assert refused + loaded == executions, name
    assert re.search(r"the same values as safetensors: \d+", done.stdout)
    assert done.stdout.splitlines()[-1] == f"{len(TARGETS) * EXECUTIONS:,} executions, 0 faults"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run(Path(__file__).with_name("planted_faults.py"), tmp_path_factory.mktemp("planted"))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("reader", "problem"),
    [
        ("Foreign", "a foreign exception: KeyError"),
        ("Crash", "SIGABRT"),
        ("Hang", "it took more than"),
        ("Spin", r"it took \d\.\d seconds"),
        ("Memory", r"it took \d{3} MiB"),
        ("Absurd", "memory was asked for that is not there"),
        ("Outside", "an escape: open .*/etc/hosts"),
        ("Writes", "an escape: open .*planted"),
        ("Pickle", "an escape: os.system"),
        ("Control", r"a message with the character '\\x1b'"),
        ("Lies", "the values of 'a' are others each time"),
        ("Differs", "another reader has another verdict"),
    ],
)
def test_the_harness_notices_a_reader_that(reader: str, problem: str, planted: dict[str, Any]) -> None:
    said = planted[reader]
    assert said["executions"] == 2
    assert said["faults"] == 2
    assert all(re.search(problem, text) for text in said["problems"])
    assert said["kept"][0] == ["file"], "the input is kept"


def test_the_harness_has_nothing_against_a_reader_that_refuses(planted: dict[str, Any]) -> None:
    assert planted["Sound"] == {"executions": 2, "refused": 2, "faults": 0, "problems": [], "kept": []}
