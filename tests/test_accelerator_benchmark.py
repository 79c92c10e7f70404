"""The benchmark for accelerators works, as far as it does without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "options"),
    [("into parameters", []), ("safe_open", ["--cold"]), ("from_pretrained", ["--cast"])],
    ids=["parameters", "cold", "cast"],
)
def test_a_small_run_prints_ways_beside_the_limit(tmp_path: Path, only: str, options: list[str]) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "accelerator.py", "--gigabytes", "0.002", "--runs", "1", "--json"]
    done = subprocess.run(
        [*command, "--folder", tmp_path, "--only", only, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    limit, *ways = json.loads(done.stdout.splitlines()[-1])["ways"].items()
    assert limit[0].startswith("limit")
    assert ways
    assert all(only in way and way in done.stdout and median["seconds"] > 0 for way, median in ways)
