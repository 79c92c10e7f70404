"""The benchmark for accelerators works, as far as it does without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--cast", "--cold"]], ids=["warm", "cast, cold"])
def test_a_small_run_prints_every_way_beside_the_limit(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "accelerator.py", "--gigabytes", "0.002", "--runs", "1", "--json"]
    done = subprocess.run(
        [*command, "--folder", tmp_path, *options], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout.splitlines()[-1])["ways"]
    for way in (
        "limit: copies from page-locked memory",
        "weightloaders, into parameters",
        "transformers from_pretrained",
    ):
        assert way in done.stdout
        assert ways[way]["seconds"] > 0
