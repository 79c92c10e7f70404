"""Time to bring a checkpoint onto an accelerator, side by side with other ways in one run. README.md has the method.

Without an accelerator everything goes to the CPU: that shows that the program works, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

LIMIT = "limit: copies from page-locked memory"
OURS = "weightloaders, into parameters"
OURS_BUILT = "weightloaders from_pretrained"
BUFFER = 64 << 20


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """A Llama in bfloat16, in five shards or so; small ones are narrower, too."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048 if gigabytes >= 0.5 else 256
    # Attention takes 4, the three projections of the MLP 8.25 squares of the width.
    layers = max(1, round(gigabytes * 1e9 / (2 * 12.25 * width * width)))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=max(1, int(gigabytes * 1e9 / 5)))


def on_device(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with its memory on the device already."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model.to_empty(device=device)


# ------------------------------------------------------------------ the ways


def limit(folder: Path, device: torch.device, _: torch.dtype) -> Callable[[], Any]:
    import torch

    model = on_device(folder, device, torch.bfloat16)
    host = torch.ones(BUFFER, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def run() -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                there = parameter.view(-1).view(torch.uint8)
                for at in range(0, there.numel(), BUFFER):
                    part = there[at : at + BUFFER]
                    part.copy_(host[: part.numel()], non_blocking=True)
        return None

    return run


def ours(folder: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    import weightloaders.api

    model = on_device(folder, device, dtype)

    def run() -> Any:
        weightloaders.api.load_into(model, folder, loader="local", progress=False)
        return model

    return run


def ours_built(folder: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    import weightloaders.api

    return lambda: weightloaders.api.from_pretrained(
        folder, loader="local", device_map={"": str(device)}, dtype=dtype, progress=False
    )[0]


def transformers_built(folder: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(folder, device_map={"": str(device)}, dtype=dtype)


def safetensors_device(folder: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    from safetensors import safe_open

    model = on_device(folder, device, dtype)

    def run() -> Any:
        import torch

        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, "pt", device=str(device)) as opened:
                    for name in opened.keys():  # noqa: SIM118 -- not a mapping
                        parameters[name].copy_(opened.get_tensor(name))
        return model

    return run


def fastsafetensors_device(folder: Path, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    model = on_device(folder, device, dtype)

    def run() -> Any:
        import torch

        parameters = dict(model.named_parameters())
        loader = SafeTensorsFileLoader(SingleGroup(), str(device), nogds=True)
        loader.add_filenames({0: [str(file) for file in sorted(folder.glob("*.safetensors"))]})
        with torch.no_grad():
            buffer = loader.copy_files_to_device()
            for name in loader.get_keys():
                parameters[name].copy_(buffer.get_tensor(name))
            buffer.close()
        loader.close()
        return model

    return run


WAYS: dict[str, Callable[[Path, torch.device, torch.dtype], Callable[[], Any]]] = {
    LIMIT: limit,
    OURS: ours,
    "safe_open(device=) + copy_": safetensors_device,
    "fastsafetensors + copy_": fastsafetensors_device,
    OURS_BUILT: ours_built,
    "transformers from_pretrained": transformers_built,
}
NEEDS = {"fastsafetensors + copy_": "fastsafetensors", "transformers from_pretrained": "accelerate"}


# ------------------------------------------------------------------ one load


def status(field: str) -> int:
    """A line of this process's status, in bytes; 0 where the system has none."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text()
        return int(text.split(field + ":")[1].split()[0]) * 1024
    return 0


def one_load(way: str, folder: Path, device_name: str, *, cast: bool) -> dict[str, float]:
    """Load once; time is from the call until the device has everything."""
    import torch

    device = torch.device(device_name)
    synchronize = (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))
    dtype = torch.float32 if cast else torch.bfloat16
    # What each way imports, and sets up on the device, is not what is measured.
    WAYS[way](folder / "small", device, dtype)()
    run = WAYS[way](folder / "full", device, dtype)
    synchronize()
    before = status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    model = run()
    synchronize()
    seconds = time.perf_counter() - start
    extra = max(0, status("VmHWM") - before)
    parameters = () if model is None else (parameter for _, parameter in sorted(model.named_parameters()))
    with torch.no_grad():
        total = sum(parameter.double().sum().item() for parameter in parameters)
    return {"seconds": seconds, "extra": extra, "sum": total, "checked": model is not None}


def drop_cache(folder: Path) -> None:
    for file in (folder / "full").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", help="default: the accelerator, else the CPU")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; default: a temporary folder")
    parser.add_argument("--cold", action="store_true", help="drop the page cache of the files before each load")
    parser.add_argument("--cast", action="store_true", help="load into float32")
    parser.add_argument("--only", default="", metavar="TEXT", help="beside the limit, ways whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print the medians as JSON, too")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device is None:
        import torch

        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        options.device = "cpu" if kind is None else f"{kind.type}:0"
    if options.one:
        print(json.dumps(one_load(options.one[0], Path(options.one[1]), options.device, cast=options.cast)))
        return
    wanted = [way for way in WAYS if options.only in way or way == LIMIT]
    ways = [way for way in wanted if importlib.util.find_spec(NEEDS.get(way, "torch")) is not None]
    for way in sorted({*wanted} - {*ways}):
        print(f"{way}: left out, {NEEDS[way]} is not installed")
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_checkpoint(Path(name) / "full", options.gigabytes)
        write_checkpoint(Path(name) / "small", 0.002)
        nbytes = sum(file.stat().st_size for file in Path(name, "full").glob("*.safetensors"))
        for _ in range(options.runs):
            for way in random.sample(ways, len(ways)):
                if options.cold:
                    drop_cache(Path(name))
                command = [sys.executable, __file__, "--device", options.device, "--one", way, name]
                command += ["--cast"] if options.cast else []
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{way} failed:\n{done.stderr}")
                results[way].append(json.loads(done.stdout.splitlines()[-1]))
    sums = {result["sum"] for runs in results.values() for result in runs if result["checked"]}
    if len(sums) > 1:
        sys.exit(f"the ways do not agree on the values: {sums}")
    show(results, nbytes, options.device, as_json=options.json)


def show(results: dict[str, list[dict[str, float]]], nbytes: int, device: str, *, as_json: bool) -> None:
    """Print medians, and each beside the limit and beside ours of its kind."""
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in ("seconds", "extra")}
        for way, runs in results.items()
    }
    print(f"{nbytes / 1e9:.2f} GB to {device}; medians of {len(results[LIMIT])} fresh processes")
    print(f"{'':38} {'seconds':>8} {'GB/s':>7} {'of the limit':>13} {'against ours':>13} {'extra host MB':>14}")
    for way, median in medians.items():
        seconds = median["seconds"]
        mine = medians.get(OURS_BUILT if "from_pretrained" in way else OURS)
        ratio = "" if mine is None else f"{seconds / mine['seconds']:.2f}x"
        print(
            f"{way:38} {seconds:8.3f} {nbytes / 1e9 / seconds:7.2f} {medians[LIMIT]['seconds'] / seconds:12.0%} "
            f"{ratio:>13} {median['extra'] / 1e6:14.0f}"
        )
    if as_json:
        print(json.dumps({"bytes": nbytes, "device": device, "ways": medians}))


if __name__ == "__main__":
    main()
