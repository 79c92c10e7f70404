from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# What these tests share is not a part of any package.
sys.path.append(str(Path(__file__).parent))

# Read by vLLM when it is imported.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"), VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_engine_at_a_time():
    yield
    if "vllm.distributed" in sys.modules:
        sys.modules["vllm.distributed"].cleanup_dist_env_and_memory()
