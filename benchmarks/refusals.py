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


def one_load(way: str, folder: Path) -> tuple[float, str]:
    """The seconds it took, and the error's first lines; empty if it loads."""
    import torch
    import transformers

    import weightloaders.api

    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable()
    # What each way imports, and what is done only once in a process, is not what is measured.
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    weightloaders.api.plan_load(torch.nn.Linear(1, 1), {})
    start = time.perf_counter()
    try:
        if way == "weightloaders":
            weightloaders.api.from_pretrained(folder, progress=False)
        else:
            transformers.AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is what the user gets
        seconds = time.perf_counter() - start
        lines = [line.strip().removeprefix("- ") for line in str(error).splitlines() if line.strip()]
        # Ours say first that nothing was changed.
        said = lines[1] if lines[0].endswith("nothing was changed") else lines[0]
        return seconds, f"{type(error).__name__}: {said}"
    return time.perf_counter() - start, ""


def in_a_process(way: str, folder: Path) -> tuple[float, str]:
    command = [sys.executable, __file__, "--one", way, str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, said = json.loads(output.splitlines()[-1])
    return seconds, said.replace(f"{folder}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny checkpoints, to see the messages")
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, folder = options.one
        print(json.dumps(one_load(way, Path(folder))))
        return
    with tempfile.TemporaryDirectory() as name:
        for kind, table in TABLES.items():
            whole, spoilt = Path(name) / kind, Path(name) / "spoilt"
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
                    results = [in_a_process(way, spoilt) for _ in range(options.runs)]
                    seconds = statistics.median(seconds for seconds, _ in results)
                    print(f"  {way:14} {seconds:7.3f} s  {results[0][1] or 'loads'}", flush=True)
            shutil.rmtree(whole)


if __name__ == "__main__":
    main()
