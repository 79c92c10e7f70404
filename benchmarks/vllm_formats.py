"""weightloaders in vLLM, beside vLLM's own load formats: time and memory to fill one model from one checkpoint.

See README.md for the method. To be run where vLLM is: ``.venv-vllm/bin/python -m benchmarks.vllm_formats``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Format -> what vLLM is told, beside the model.
FORMATS: dict[str, dict[str, Any]] = {
    "weightloaders": {"load_format": "weightloaders:local"},
    "weightloaders, unwatched": {
        "load_format": "weightloaders:local", "model_loader_extra_config": {"watch": False},
    },
    "weightloaders, read ahead": {
        "load_format": "weightloaders:local", "model_loader_extra_config": {"transfer": "direct"},
    },
    "safetensors (vLLM's default)": {"load_format": "safetensors"},
    "safetensors, eager": {"load_format": "safetensors", "safetensors_load_strategy": "eager"},
    "safetensors, prefetch": {"load_format": "safetensors", "safetensors_load_strategy": "prefetch"},
    "safetensors, 8 threads": {
        "load_format": "safetensors", "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 8},
    },
    "runai_streamer": {"load_format": "runai_streamer"},
    "fastsafetensors": {"load_format": "fastsafetensors"},
    "sharded_state": {"load_format": "sharded_state"},
}  # fmt: skip
HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 5632, 32000


def write(folder: Path, layers: int) -> None:
    """A random Llama in shards, and the same as vLLM's ``sharded_state`` has it is written by `main`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False, torch_dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    model.save_pretrained(folder, max_shard_size="500MB")


def drop(files: Sequence[Path]) -> None:
    """Out of the page cache, as far as the system lets one do that."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read(files: Sequence[Path]) -> None:
    """Into the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass


def memory(field: str) -> int:
    """A line of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and by how many bytes the process's resident memory rose at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, start = memory("VmRSS"), time.perf_counter()
    call()
    return time.perf_counter() - start, memory("VmHWM") - before


def _loading(folder: Path, options: dict[str, Any]) -> Callable[[], object]:
    """What a format does to fill a model that was built before, which is not timed."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    config = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True, **options
    ).create_engine_config()
    loader = get_model_loader(config.load_config)
    models = {}

    def call() -> None:
        with set_current_vllm_config(config):
            loader.load_weights(models["model"], config.model_config)

    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        models["model"] = initialize_model(vllm_config=config, model_config=config.model_config)
    for parameter in models["model"].parameters():
        parameter.data.fill_(0)
    return call


def _save_sharded(folder: Path, target: Path) -> None:
    """As ``sharded_state`` wants it: vLLM's own parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    config = EngineArgs(
        model=str(folder), dtype="bfloat16", max_model_len=128, skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    target.mkdir()
    ShardedStateLoader.save_model(model, str(target), pattern=None, max_size=None)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())


def main(arguments: Sequence[str]) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_formats", description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of the model; about 90 MB each")
    parser.add_argument("--runs", type=int, default=5, help="rounds of all formats")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is written: a disk, for cold loads to mean much"
    )
    options = parser.parse_args(arguments)
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS="1", TQDM_DISABLE="1",
    )  # fmt: skip

    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    # As vLLM's worker for CPUs does.
    torch.accelerator.empty_cache = lambda: None
    load_general_plugins()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder, sharded = Path(scratch, "model"), Path(scratch, "sharded")
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{scratch}/meeting", 0, backend="gloo")
            initialize_model_parallel(1, backend="gloo")
        write(folder, options.layers)
        _save_sharded(folder, sharded)
        calls: dict[str, tuple[Callable[[], object], list[Path]]] = {}
        seconds: dict[tuple[str, str], list[float]] = {}
        peaks: dict[str, int] = {}
        left_out = {}
        for name, told in FORMATS.items():
            source = sharded if name == "sharded_state" else folder
            try:
                call = _loading(source, told)
                # First calls and lazy imports are not what is timed.
                call()
            except Exception as error:  # noqa: BLE001 -- the table says what does not run here
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                calls[name] = call, sorted(source.glob("*.safetensors"))
        for _ in range(options.runs):
            for state, prepare in (("cold", drop), ("warm", read)):
                for name, (call, files) in calls.items():
                    prepare(files)
                    took, peak = measured(call)
                    seconds.setdefault((name, state), []).append(took)
                    peaks[name] = max(peaks.get(name, 0), peak)
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    lines = [
        f"{total / 1e6:.0f} MB, medians of {options.runs} rounds",
        "",
        "| format | warm, s | cold, s | memory, MB |",
    ]
    lines.append("|---|---|---|---|")
    for name in calls:
        warm, cold = (statistics.median(seconds[name, state]) for state in ("warm", "cold"))
        lines.append(f"| {name} | {warm:.2f} | {cold:.2f} | {peaks[name] / 1e6:.0f} |")
    lines.extend(f"| {name} | does not run here: {why} | | |" for name, why in left_out.items())
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.write(json.dumps({f"{n}, {s}": [round(x, 3) for x in v] for (n, s), v in seconds.items()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
