"""GGUF, ours beside transformers' own: time and memory for SmolLM2-135M-Instruct in Q4_1, 98 MB.

See README.md for the method.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import memory
from benchmarks.peers.running import sampling
from demo.prepare import smollm2_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("weightloaders", "transformers")
PARTS = ("model, float32", "model, bfloat16", "tokenizer")
_TINY = {
    "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": 2, "rope.dimension_count": 16, "vocab_size": 32,
}  # fmt: skip

Record = dict[str, Any]


# ------------------------------------------------------------------ in a process of its own


def load(way: str, part: str, file: Path) -> Any:
    """Load one part of a file by one way."""
    import torch
    import transformers

    import weightloaders
    from weightloaders import WeightLoaderRegistry

    if part == "tokenizer":
        if way == "transformers":
            return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        folder = WeightLoaderRegistry.resolve("gguf").get_model_files(str(file))
        return transformers.AutoTokenizer.from_pretrained(folder)
    dtype = getattr(torch, part.split()[-1])
    if way == "transformers":
        family = transformers.AutoModelForCausalLM
        return family.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return weightloaders.from_pretrained(file, dtype=dtype, progress=False)[0]


def fingerprint(part: str, loaded: Any) -> str:
    """SHA-256 of what was loaded."""
    if part == "tokenizer":
        return hashlib.sha256(loaded.backend_tokenizer.to_str().encode()).hexdigest()
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def measure(way: str, part: str, tiny: str) -> None:
    """Do what the parent asks for, line by line."""
    file = smollm2_gguf()
    # Imports and first calls are not what is timed.
    if part != "tokenizer":
        load(way, part, Path(tiny))
    else:
        import weightloaders.llm.engines.transformers  # noqa: F401
    memory.make_warm([file])
    memory.touch(1 << 30)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loaded = load(way, part, file)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    size = sum(p.numel() * p.element_size() for p in loaded.parameters()) if part != "tokenizer" else 0
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "cpu": cpu, "model": size}), flush=True)
    sys.stdin.readline()
    print(json.dumps(fingerprint(part, loaded)), flush=True)


# ------------------------------------------------------------------ the parent


def write_tiny(file: Path) -> None:
    """A Llama that is loaded in no time."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "llama")
    for key, value in _TINY.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = ["token_embd", *(f"blk.0.{leaf}" for leaf in square)]
    for name in names:
        writer.add_tensor(
            f"{name}.weight",
            gguf.quants.quantize(np.ones((32, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1),
            raw_dtype=gguf.GGMLQuantizationType.Q4_1,
        )
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def one(way: str, part: str, tiny: Path, *, watch: bool) -> Record:
    """One measurement, in a process of its own."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "benchmarks.gguf", "--child", way, part, str(tiny)]
    with subprocess.Popen(
        command, text=True, bufsize=1, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip

        def answer() -> Any:
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"{way}, {part}: its process ended with {process.wait()}")
            return json.loads(line)

        answer()
        before, peaks = memory.status(process.pid), {}
        process.stdin.write("\n")  # type: ignore[union-attr]
        if watch:
            with sampling(process.pid, peaks):
                record: Record = answer()
        else:
            record = answer()
        process.stdin.write("\n")  # type: ignore[union-attr]
        record["fingerprint"] = answer()
    if watch:
        grown = sum(peaks[key] - before[key] for key in ("RssAnon", "RssShmem"))
        record |= {"peak": grown, "extra": grown - record["model"]}
    return record


def main() -> int:
    """Measure and print a table.

    Returns:
        The exit status: 0 if both ways loaded the same.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="timed rounds, beside one that watches memory")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "PART", "TINY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(*arguments.child)
        return 0
    records: dict[tuple[str, str], list[Record]] = {(part, way): [] for part in PARTS for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.gguf"
        write_tiny(tiny)
        for number in range(arguments.runs + 1):
            order = list(records)
            random.shuffle(order)
            for part, way in order:
                # The one that is watched is not timed.
                records[part, way].append(one(way, part, tiny, watch=number == 0))
    say(records)
    return 0 if all(len(prints) == 1 for prints in _fingerprints(records).values()) else 1


def _fingerprints(records: Mapping[tuple[str, str], list[Record]]) -> dict[str, set[str]]:
    return {part: {r["fingerprint"] for way in WAYS for r in records[part, way]} for part in PARTS}


def say(records: Mapping[tuple[str, str], list[Record]]) -> None:
    """Print what was measured."""
    print(f"{'':<18}{'':<15}{'seconds':>9}{'spread':>14}{'cpu s':>8}{'peak MB':>9}{'extra MB':>10}")
    for (part, way), (watched, *timed) in records.items():
        seconds = [record["seconds"] for record in timed]
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        cpu = statistics.median(record["cpu"] for record in timed)
        print(
            f"{part:<18}{way:<15}{statistics.median(seconds):>9.2f}{spread:>14}{cpu:>8.2f}"
            f"{watched['peak'] / 1e6:>9.0f}{watched['extra'] / 1e6:>10.0f}"
        )
    for part, found in _fingerprints(records).items():
        print(f"{part}: {'the same by both ways' if len(found) == 1 else 'THE WAYS DIFFER'}")


if __name__ == "__main__":
    sys.exit(main())
