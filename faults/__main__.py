"""The command: ``python -m faults``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from faults.shim import VARIABLE, build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description="Loads and saves while something fails.")
    parser.add_argument("--executions", type=int, default=300, help="how many of each kind")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first one; each has its own, one more than the last"
    )
    parser.add_argument("--only", choices=("loads", "saves"), help="one kind alone")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds after which an execution counts as hanging"
    )
    parser.add_argument("-v", action="store_true", help="show where the errors of what was lost come from")
    arguments = parser.parse_args()
    if VARIABLE not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = build(Path(folder))
            # A forked child has none of torch's threads, and would wait for them.
            preloaded = {VARIABLE: str(library), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **preloaded}
            return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-m", "faults", *sys.argv[1:]], environment)
    from faults.running import run

    return run(arguments.executions, arguments.seed, arguments.only, arguments.patience)


if __name__ == "__main__":
    sys.exit(main())
