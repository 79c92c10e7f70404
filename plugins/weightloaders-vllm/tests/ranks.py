"""One of several processes that load models as vLLM's workers do, without an engine around them.

``python ranks.py RANK NUMBER MEETING_FILE JOBS``: for each job a line of JSON with what was loaded, or the error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib


def checksums(model) -> dict[str, int]:
    """Of all parameters, as they are when vLLM has done with them."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.named_parameters()}
    return {name: zlib.crc32(t.flatten().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def run(job: dict, ranks: int) -> dict:
    from weightloaders_vllm.loader import report_of

    from weightloaders.errors import LoadError

    if job.pop("dies", False):
        os._exit(7)
    options = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, **job}
    config = EngineArgs(**options, tensor_parallel_size=ranks, distributed_executor_backend="mp").create_engine_config()
    try:
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is told
        return {"error": type(error).__name__, "said": str(error), "is_load_error": isinstance(error, LoadError)}
    report = report_of(model)
    return {
        "checksums": checksums(model),
        "read": None if report is None else report.bytes_read,
        "mapped": None if report is None else report.bytes_by_path.get("mapped", 0),
        "unexpected": None if report is None else report.unexpected,
    }


if __name__ == "__main__":
    rank, ranks, meeting, jobs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    # As vLLM's worker for CPUs does.
    torch.accelerator.empty_cache = lambda: None
    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{meeting}", rank, backend="gloo")
        initialize_model_parallel(ranks, backend="gloo")
    for job in jobs:
        by_rank = job.pop("by_rank", {})
        print("LOADED", json.dumps(run(job | by_rank.get(str(rank), {}), ranks)), flush=True)  # noqa: T201
        gc.collect()
