"""Time and memory that planning takes: a checkpoint of DeepSeek-V3's size, of which there are headers only.

See README.md for the method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# Of https://huggingface.co/deepseek-ai/DeepSeek-V3: 91,991 tensors in 163 files.
HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, VOCABULARY = 7168, 18432, 2048, 129280
HEADS, EXPERTS, DENSE_LAYERS, MOE_LAYERS, SHARDS = 128, 256, 3, 58, 163
BLOCK = 128
# Tensors -> layers of experts that come to about as many, of 1558 tensors each.
SIZES = {20_000: 12, 40_000: 25, 80_000: 51, 91_991: MOE_LAYERS}
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors_of(moe_layers: int, *, quantised: bool = True) -> Tensors:
    """Name -> dtype and shape: the released checkpoint, or as many of its layers; plain ones are all bfloat16."""
    found: Tensors = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = ("F8_E4M3" if quantised else "BF16", (rows, columns))
        if quantised:
            found[f"{name}.weight_scale_inv"] = ("F32", (-(-rows // BLOCK), -(-columns // BLOCK)))

    def mlp(name: str, width: int) -> None:
        for part, shape in (("gate", (width, HIDDEN)), ("up", (width, HIDDEN)), ("down", (HIDDEN, width))):
            linear(f"{name}.{part}_proj", *shape)

    found["model.embed_tokens.weight"] = ("BF16", (VOCABULARY, HIDDEN))
    # What the release has behind its last layer predicts a token more; transformers' model has no such layer.
    for layer in range(DENSE_LAYERS + moe_layers + quantised):
        front = f"model.layers.{layer}"
        attention = f"{front}.self_attn"
        linear(f"{attention}.q_a_proj", 1536, HIDDEN)
        linear(f"{attention}.q_b_proj", HEADS * 192, 1536)
        linear(f"{attention}.kv_a_proj_with_mqa", 576, HIDDEN)
        linear(f"{attention}.kv_b_proj", HEADS * 256, 512)
        linear(f"{attention}.o_proj", HIDDEN, HEADS * 128)
        norms = {
            "input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN, "self_attn.q_a_layernorm": 1536,
            "self_attn.kv_a_layernorm": 512,
        }  # fmt: skip
        found.update((f"{front}.{name}.weight", ("BF16", (size,))) for name, size in norms.items())
        if layer < DENSE_LAYERS:
            mlp(f"{front}.mlp", INTERMEDIATE)
            continue
        found[f"{front}.mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        found[f"{front}.mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
        mlp(f"{front}.mlp.shared_experts", MOE_INTERMEDIATE)
        for expert in range(EXPERTS):
            mlp(f"{front}.mlp.experts.{expert}", MOE_INTERMEDIATE)
    if quantised:
        found[f"{front}.eh_proj.weight"] = ("BF16", (HIDDEN, 2 * HIDDEN))
        found.update((f"{front}.{name}.weight", ("BF16", (HIDDEN,))) for name in ("enorm", "hnorm", "shared_head.norm"))
        found.update(
            (f"{front}.{n}.weight", ("BF16", (VOCABULARY, HIDDEN))) for n in ("embed_tokens", "shared_head.head")
        )
    found["model.norm.weight"] = ("BF16", (HIDDEN,))
    found["lm_head.weight"] = ("BF16", (VOCABULARY, HIDDEN))
    return found


def nbytes(tensor: tuple[str, tuple[int, ...]]) -> int:
    code, shape = tensor
    size = BYTES[code]
    for n in shape:
        size *= n
    return size


def write_checkpoint(folder: Path, tensors: Tensors) -> None:
    """Headers and an index; where the data would be, the files are sparse."""
    folder.mkdir()
    budget = sum(map(nbytes, tensors.values())) / (SHARDS - 0.5)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if filled > budget * len(shards):
            shards.append([])
        shards[-1].append(name)
        filled += nbytes(tensor)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        ends = list(itertools.accumulate((nbytes(tensors[name]) for name in names), initial=0))
        header = {
            name: {"dtype": tensors[name][0], "shape": tensors[name][1], "data_offsets": [start, end]}
            for name, start, end in zip(names, ends, ends[1:], strict=False)
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + ends[-1])
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": filled}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------------ models


def skeleton(tensors: Tensors) -> torch.nn.Module:
    """A module whose parameters have these names, dtypes and shapes, on meta."""
    import torch

    from weightloaders.weights.safetensors_header import DTYPES

    root = torch.nn.Module()
    modules: dict[str, torch.nn.Module] = {"": root}

    def module(path: str) -> torch.nn.Module:
        if path not in modules:
            parent, _, leaf = path.rpartition(".")
            modules[path] = torch.nn.Module()
            module(parent).add_module(leaf, modules[path])
        return modules[path]

    for name, (code, shape) in tensors.items():
        path, _, leaf = name.rpartition(".")
        tensor = torch.empty(shape, dtype=DTYPES[code], device="meta")
        module(path).register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def stacked(tensors: Tensors) -> Tensors:
    """The same parameters as an inference engine has them: gate and up fused, experts stacked."""
    found: Tensors = {}
    for name, (code, (rows, *columns)) in tensors.items():
        segments = name.split(".")
        if segments[-2] == "up_proj":
            continue
        if segments[-2] == "gate_proj":
            segments[-2], rows = "gate_up_proj", 2 * rows
        shape: tuple[int, ...] = (rows, *columns)
        if segments[-4:-3] == ["experts"]:
            del segments[-3]
            shape = (EXPERTS, *shape)
        found.setdefault(".".join(segments), (code, shape))
    return found


# Leaf by leaf, so that scales go the way of their weights.
STACKING = [
    {
        "sources": [f"**.experts.{{e}}.{part}_proj.{{leaf}}" for part in ("gate", "up")],
        "targets": "**.experts.gate_up_proj.{leaf}",
        "function": "stack_experts",
    },
    {
        "sources": "**.experts.{e}.down_proj.{leaf}",
        "targets": "**.experts.down_proj.{leaf}",
        "function": "stack_experts",
    },
    {
        "sources": [f"**.{part}_proj.{{leaf}}" for part in ("gate", "up")],
        "targets": "**.gate_up_proj.{leaf}",
        "function": "fuse_gate_up",
    },
]


def deepseek(moe_layers: int) -> torch.nn.Module:
    """The model of that size that transformers builds, on meta."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(num_hidden_layers=DENSE_LAYERS + moe_layers, dtype="bfloat16")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


MODELS = ("the same names", "fused and stacked", "fused, 200 more rules", "transformers")


def model_and_rules(kind: str, moe_layers: int) -> tuple[torch.nn.Module, Any]:
    if kind == "transformers":
        return deepseek(moe_layers), None
    tensors = tensors_of(moe_layers)
    if kind == "the same names":
        return skeleton(tensors), None
    rules: dict[str, list[Any]] = {"convert": STACKING}
    if kind == "fused, 200 more rules":
        adapters = [
            {"sources": f"**.adapter{i}.{{leaf}}", "targets": f"**.a{i}.{{leaf}}", "function": "transpose"}
            for i in range(100)
        ]
        rules = {
            "rename": [{f"**.old{i}": f"**.new{i}"} for i in range(70)],
            "drop": [f"adapter{i}.bias" for i in range(30)],
            "convert": [*adapters, *STACKING],
        }
    return skeleton(stacked(tensors)), rules


# ------------------------------------------------------------------ measuring


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


def one_plan(kind: str, folder: Path, moe_layers: int, profile: str | None) -> dict[str, float]:
    import weightloaders.api

    model, rules = model_and_rules(kind, moe_layers)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start, used = time.perf_counter(), time.process_time()
    weights = weightloaders.api.open_weights(folder, "local")
    opened = time.perf_counter()
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        plan = profiler.runcall(weightloaders.api.plan_load, model, weights, rules=rules)
        profiler.dump_stats(profile)
    else:
        plan = weightloaders.api.plan_load(model, weights, rules=rules)
    planned, used = time.perf_counter(), time.process_time() - used
    peak = status("VmHWM")
    if plan.missing or not plan.ok:
        sys.exit(f"the plan is not complete: {plan}"[:2000])
    return {
        "tensors": len(weights), "opening": opened - start, "planning": planned - opened, "used": used,
        "parameters": len(plan.loaded), "extra": peak - before, "peak": peak,
    }  # fmt: skip


def runs(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as name:
        for kind, (size, moe_layers) in itertools.product(options.models, SIZES.items()):
            if options.sizes and size not in options.sizes:
                continue
            quantised = kind != "transformers"
            folder = Path(name) / f"{moe_layers}-{quantised}"
            if not folder.exists():
                write_checkpoint(folder, tensors_of(moe_layers, quantised=quantised))
            command = [sys.executable, __file__, "--one", kind, str(folder), str(moe_layers)]
            command += ["--profile", options.profile] if options.profile else []
            best: dict[str, float] = {}
            for _ in range(options.runs):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                result = json.loads(done.stdout.splitlines()[-1])
                best = {key: min(value, best.get(key, value)) for key, value in result.items()}
            yield kind, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES)
    parser.add_argument("--runs", type=int, default=3, help="the quickest counts")
    parser.add_argument("--profile", metavar="FILE", help="where cProfile writes what planning spent its time on")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "FOLDER", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, folder, layers = options.one
        print(json.dumps(one_plan(kind, Path(folder), int(layers), options.profile)))
        return
    print(
        f"{'model':22} {'tensors':>8} {'parameters':>10} {'opening s':>9} {'planning s':>10} {'cpu s':>6} "
        f"{'us/tensor':>9} "
        f"{'extra MB':>8} {'peak MB':>7}"
    )
    for kind, result in runs(options):
        print(
            f"{kind:22} {result['tensors']:8.0f} {result['parameters']:10.0f} {result['opening']:9.2f} "
            f"{result['planning']:10.2f} {result['used']:6.2f} {result['used'] / result['tensors'] * 1e6:9.1f} "
            f"{result['extra'] / 1e6:8.0f} {result['peak'] / 1e6:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
