"""Time to fill a model's parameters, side by side with other ways in one run. See README.md for the method."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("weightloaders", "load_file + load_state_dict", "safe_open + copy_")
WIDTH = 2048


def layers(gigabytes: float) -> int:
    return max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * 2)))


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    names = [f"layers.{i}.weight" for i in range(layers(gigabytes))]
    shards = [names[i::4] for i in range(4)]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-00004.safetensors"
        save_file({name: torch.randn(WIDTH, WIDTH).to(torch.bfloat16) for name in shard}, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


def one_load(way: str, folder: Path, gigabytes: float, *, cast: bool) -> dict[str, float]:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    dtype = torch.float32 if cast else torch.bfloat16
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(layers(gigabytes))
    )
    files = sorted(folder.glob("*.safetensors"))
    # What each way imports is not what is measured.
    import safetensors.torch

    import weightloaders.api

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    if way == "weightloaders":
        weightloaders.api.load_into(model, folder, loader="local", progress=False)
    elif way == "load_file + load_state_dict":
        state: dict[str, torch.Tensor] = {}
        for file in files:
            state.update(safetensors.torch.load_file(file))
        model.load_state_dict(state)
    else:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for file in files:
                with safetensors.safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 -- not a mapping
                        parameters[name].copy_(opened.get_tensor(name))
    total = sum(float(p.detach().view(-1)[:: 4096 // p.element_size()].sum()) for p in model.parameters())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "extra": max(0, status("VmHWM") - before), "sum": total}


def drop_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--cast", action="store_true", help="load into float32")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, folder = options.one
        print(json.dumps(one_load(way, Path(folder), options.gigabytes, cast=options.cast)))
        return
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), options.gigabytes)
        for _ in range(options.runs):
            for way in random.sample(WAYS, len(WAYS)):
                if options.cold:
                    drop_cache(Path(name))
                command = [sys.executable, __file__, "--gigabytes", str(options.gigabytes), "--one", way, name]
                command += ["--cast"] if options.cast else []
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results[way].append(json.loads(output.splitlines()[-1]))
    sums = {result["sum"] for runs in results.values() for result in runs}
    if len(sums) > 1:
        sys.exit(f"the ways do not agree on the values: {sums}")
    ours = statistics.median(r["seconds"] for r in results[WAYS[0]])
    print(f"{'':30} {'seconds':>8} {'GB/s':>6} {'against ours':>13} {'extra memory MB':>16}")
    for way, runs in results.items():
        seconds = statistics.median(r["seconds"] for r in runs)
        extra = statistics.median(r["extra"] for r in runs) / 1e6
        print(f"{way:30} {seconds:8.3f} {options.gigabytes / seconds:6.2f} {seconds / ours:12.2f}x {extra:16.0f}")


if __name__ == "__main__":
    main()
