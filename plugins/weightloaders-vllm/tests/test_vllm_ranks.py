"""Several ranks, each in a process of its own, filled by vLLM's real models as its workers do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment with it")

from vllm_checkpoints import LAYER, change, drop, quantised_checkpoint, tiny_checkpoint

# What vLLM needs to start takes long on a busy machine; what hangs takes longer.
PATIENCE = 400


def load(folder: Path, *jobs: dict, ranks: int = 2) -> list[list[dict]]:
    """For each rank what each job came to; None for those that it didn't live to see."""
    logs = [(folder / f"rank-{rank}.log").open("w") for rank in range(ranks)]
    command = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder / "meeting"), json.dumps(jobs)],
            stdout=subprocess.PIPE, stderr=logs[rank], text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        for log in logs:
            log.close()
    found = [[json.loads(line[7:]) for line in output.splitlines() if line.startswith("LOADED ")] for output in outputs]
    if not any(found):
        pytest.fail((folder / "rank-0.log").read_text()[-3000:])
    return found


def damaged(folder: Path, how) -> dict:
    tiny_checkpoint(folder)
    change(folder, how)
    return {"model": str(folder), "load_format": "weightloaders:local"}


def test_two_ranks_have_the_parameters_of_vllms_own_loader_and_refuse_what_it_lets_through(tmp_path):
    whole = tiny_checkpoint(tmp_path / "whole")
    ours = {"model": str(whole), "load_format": "weightloaders:local"}
    q_proj, down = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.down_proj.weight"
    bias = f"{LAYER}.self_attn.q_proj.bias"
    nan = f"{LAYER}.mlp.up_proj.weight"
    jobs = {
        "vLLM's own": {"model": str(whole)},
        "ours": ours,
        "read": {**ours, "model_loader_extra_config": {"transfer": "direct"}},
        "no k_proj": damaged(tmp_path / "k", drop("layers.1.self_attn.k_proj.weight")),
        "no embed_tokens": damaged(tmp_path / "e", drop("embed_tokens.weight")),
        "q_proj too large": damaged(
            tmp_path / "q", lambda tensors: tensors.update({q_proj: torch.ones(192, 128, dtype=torch.bfloat16)})
        ),
        "down_proj too wide": damaged(
            tmp_path / "d", lambda tensors: tensors.update({down: torch.ones(128, 192, dtype=torch.bfloat16)})
        ),
        "NaN": {
            **damaged(tmp_path / "n", lambda tensors: tensors[nan][:1].fill_(float("nan"))),
            "model_loader_extra_config": {"verify": "finite"},
        },
        "a bias": damaged(tmp_path / "b", lambda tensors: tensors.update({bias: torch.ones(128)})),
        "one rank's file": {**ours, "by_rank": {1: {"model_weights": str(tmp_path / "nowhere")}}},
        "again": ours,
    }
    results = [dict(zip(jobs, found, strict=True)) for found in load(tmp_path, *jobs.values())]

    nbytes = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    for found in results:
        expected = found["vLLM's own"]["checksums"]
        assert [found[job].get("checksums") for job in ("ours", "read", "again")] == [expected] * 3
        # What is mapped is read where it is used, and each uses its part.
        assert (found["ours"]["read"], found["ours"]["mapped"]) == (0, pytest.approx(nbytes, rel=0.01))
        assert found["read"]["read"] == found["ours"]["mapped"]
        for job, names in {
            "no k_proj": [f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"],
            "no embed_tokens": ["model.embed_tokens.weight"],
            "q_proj too large": [q_proj, "[192, 128]"],
            "down_proj too wide": [down, "[128, 192]"],
        }.items():
            assert found[job].get("error") == "CoverageError", found[job]
            assert all(name in found[job]["said"] for name in names), found[job]
        assert found["a bias"]["unexpected"] == [bias]
        # Each ends where another one can't go on.
        assert all(found[job].get("error") for job in ("NaN", "one rank's file"))
    assert results[0]["vLLM's own"]["checksums"] != results[1]["vLLM's own"]["checksums"]
    first, second = (found["one rank's file"] for found in results)
    assert "nowhere" in second["said"]
    assert first["is_load_error"]
    assert "rank 1 of 2" in first["said"]
    assert "nowhere" in first["said"]


def test_a_rank_that_is_killed_ends_the_others_with_an_error(tmp_path):
    job = {"model": str(tiny_checkpoint(tmp_path / "tiny")), "load_format": "weightloaders:local"}
    survivor, killed = load(tmp_path, {**job, "by_rank": {1: {"dies": True}}})
    assert killed == []
    assert survivor[0]["is_load_error"]
    assert "has ended" in survivor[0]["said"]


NEEDED = {"int8": ("weight", "weight_scale"), "float8": ("weight", "weight_scale")}
NEEDED |= {"gptq": ("qweight", "scales", "qzeros", "g_idx"), "awq": ("qweight", "scales", "qzeros")}


def test_quantised_checkpoints_load_as_by_vllms_own_loader_and_each_of_their_parts_is_needed(tmp_path):
    jobs: dict[tuple[str, str], dict] = {}
    for kind, parts in NEEDED.items():
        whole = str(quantised_checkpoint(tmp_path / kind, kind))
        jobs[kind, "vLLM's own"] = {"model": whole}
        jobs[kind, "ours"] = {"model": whole, "load_format": "weightloaders:local"}
        for name in (f"{LAYER}.{module}.{part}" for module in ("mlp.up_proj", "mlp.down_proj") for part in parts):
            folder = quantised_checkpoint(tmp_path / kind / name, kind, without=name)
            jobs[kind, name] = {"model": str(folder), "load_format": "weightloaders:local"}
    found = dict(zip(jobs, load(tmp_path, *jobs.values(), ranks=1)[0], strict=True))
    for (kind, name), result in found.items():
        if name == "ours":
            assert result.get("checksums") == found[kind, "vLLM's own"]["checksums"], (kind, result)
        elif name != "vLLM's own":
            assert result.get("error") == "CoverageError", (kind, name, result.keys())
            assert f"the checkpoint has no {name!r}" in result["said"]
