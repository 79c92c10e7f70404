"""Processor time that starting takes: importing the package, and the commands that load nothing."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

_MAIN = "from weightloaders.cli.main import main; sys.argv = ['weightloaders', {!r}]; main()"
STARTS = {
    "python": "pass",
    "import weightloaders": "import weightloaders",
    "list_available()": "import weightloaders; weightloaders.WeightLoaderRegistry.list_available()",
    "weightloaders --help": _MAIN.format("--help"),
    "weightloaders list": _MAIN.format("list"),
}
# All that a process has used when the statement is done.
_MEASURE = """
import sys, time
try:
    {statement}
except SystemExit:
    pass
print(time.process_time(), file=sys.stderr)
"""


def seconds(statement: str) -> float:
    command = [sys.executable, "-c", _MEASURE.format(statement=statement)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stderr.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    print(f"{'':24} {'median':>8} {'quickest':>9}   seconds of processor time")
    for name, statement in STARTS.items():
        measured = [seconds(statement) for _ in range(runs)]
        print(f"{name:24} {statistics.median(measured):8.3f} {min(measured):9.3f}")


if __name__ == "__main__":
    main()
