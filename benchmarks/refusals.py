"""Time to the error that a spoilt checkpoint gets, ours beside transformers' own. See README.md for the method."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import wrecks

WAYS = ("weightloaders", "transformers")
TABLES = {"llama": wrecks.LLAMA, "mixtral": wrecks.MIXTRAL}
SIZES = {"llama": {"scale": 64, "layers": 16}, "mixtral": {"scale": 32, "layers": 34}}


def one_load(way: str, folder: Path, tiny: Path) -> tuple[float, float, str]:
    """The seconds it took, those of processor time, and the error's first line; empty if it loads."""
    import torch
    import transformers

    import weightloaders.api

    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable()

    def load(folder: Path) -> None:
        if way == "weightloaders":
            weightloaders.api.from_pretrained(folder, progress=False)
        else:
            transformers.AutoModelForCausalLM.from_pretrained(folder)

    # What is imported, and what is done only once in a process, is not what is measured.
    load(tiny)
    start, processor = time.perf_counter(), time.process_time()
    said = ""
    try:
        load(folder)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is what the user gets
        said = _first_line(error)
    return time.perf_counter() - start, time.process_time() - processor, said


def _first_line(error: Exception) -> str:
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines() if line.strip()]
    # Ours say first that nothing was changed.
    said = lines[1] if lines[0].endswith("nothing was changed") else lines[0]
    return f"{type(error).__name__}: {said}"


def in_a_process(way: str, folder: Path, tiny: Path) -> tuple[float, float, str]:
    command = [sys.executable, __file__, "--one", way, str(folder), str(tiny)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, processor, said = json.loads(output.splitlines()[-1])
    return seconds, processor, said.replace(f"{folder}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny checkpoints, to see the messages")
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "FOLDER", "TINY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, folder, tiny = options.one
        print(json.dumps(one_load(way, Path(folder), Path(tiny))))
        return
    with tempfile.TemporaryDirectory() as name:
        for kind, table in TABLES.items():
            whole, spoilt, tiny = (Path(name) / part for part in (kind, "spoilt", f"tiny-{kind}"))
            wrecks.write_model(tiny, kind)
            sizes = {} if options.small else {**SIZES[kind], "vocab_size": 32000}
            wrecks.write_model(whole, kind, **sizes)
            nbytes = sum(file.stat().st_size for file in wrecks.shards(whole))
            print(
                f"\n{kind}, {len(wrecks.read_index(whole))} tensors, {nbytes / 1e6:,.0f} MB; medians of {options.runs}"
            )
            for case, spoil in {"nothing is wrong": lambda _: None, **table}.items():
                if options.only not in case:
                    continue
                shutil.rmtree(spoilt, ignore_errors=True)
                shutil.copytree(whole, spoilt)
                spoil(spoilt)
                print(f"\n{case}")
                for way in WAYS:
                    results = [in_a_process(way, spoilt, tiny) for _ in range(options.runs)]
                    seconds, processor = (statistics.median(result[at] for result in results) for at in (0, 1))
                    said = results[0][2] or "loads"
                    print(f"  {way:14} {seconds:7.3f} s ({processor:.3f} s of processor time)  {said}", flush=True)
            shutil.rmtree(whole)


if __name__ == "__main__":
    main()
