"""Have readers read hostile and broken input, and print how it was received.

The exit status is 1 where a fault was found; each input with one is kept, and named. ``--replay`` reads such an input
once more, with the whole traceback.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.documents import Config, Dcp, Index, Params, Plan, Rules
from fuzz.files import Gguf, Npz, Raw, Safetensors
from fuzz.running import fuzz
from fuzz.torch_files import TorchLegacy, TorchZip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuzz.running import Result
    from fuzz.target import Target

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (Safetensors, TorchZip, TorchLegacy, Gguf, Raw, Npz, Dcp, Index, Plan, Config, Rules, Params)
}

_HEAD = f"{'target':14}{'executions':>12}{'refused':>12}{'loaded':>12}{'slowest':>12}{'peak memory':>14}{'faults':>8}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--executions", type=int, default=4000, help="inputs for each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (default: %(default)s)")
    parser.add_argument("--faults", type=Path, default=Path(".fuzz"), help="where inputs with faults are kept")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="the input to read once more, by one target")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown or (options.replay and len(options.targets) != 1):
        parser.error(f"no such target: {', '.join(unknown)}" if unknown else "--replay goes with one target")
    if options.replay:
        return _replay(TARGETS[options.targets[0]](), options.replay)
    print(_HEAD, flush=True)
    results = []
    for name in options.targets or TARGETS:
        results.append(fuzz(TARGETS[name](), options.executions, options.seed, options.faults))
        print(_row(results[-1]), flush=True)
    faults = sum(result.faults for result in results)
    print(f"{sum(result.executions for result in results):,} executions, {faults:,} faults")
    return 1 if faults else 0


def _row(result: Result) -> str:
    row = (
        f"{result.target:14}{result.executions:12,}{result.refused:12,}{result.loaded:12,}"
        f"{result.slowest * 1e3:9.1f} ms{result.peak / (1 << 20):10.1f} MiB{result.faults:8,}"
    )
    lines = [row]
    lines += [f"    {what}: {count:,}" for what, count in sorted(result.remarks.items())]
    for path in result.kept:
        problem = path.with_name(f"{path.name}.txt").read_text("utf-8").partition("\n")[0]
        lines.append(f"    fault: {path}: {problem}")
    return "\n".join(lines)


def _replay(target: Target, folder: Path) -> int:
    """Read one input, in this process."""
    import tempfile

    from fuzz.child import Child, Counts

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with tempfile.TemporaryDirectory() as place:
        counts = Counts.from_buffer(bytearray(ctypes.sizeof(Counts)))
        child = Child(target, Path(place), counts, Path(place) / "faults")
        child.prepare(target.seeds())
        print(child.judge(files))
        for text in (Path(place) / "faults").glob("*.txt"):
            print(text.read_text("utf-8"))
        return 1 if counts.faults else 0


if __name__ == "__main__":
    sys.exit(main())
