"""What all tests share: a quiet, offline, single-threaded process, and the real models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch or huggingface_hub, which read these once. Tests run in several processes, so each
# keeps to one thread; none may reach the network, or see or change the cache of whoever runs them.
_hf_home = tempfile.mkdtemp(prefix="weightloaders-tests-hf-")
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HOME=_hf_home,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
)
for _name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "WEIGHTLOADERS_DISABLE"):
    os.environ.pop(_name, None)


def pytest_unconfigure() -> None:
    shutil.rmtree(_hf_home, ignore_errors=True)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (bfloat16, shards with an index); read it only."""
    from demo.prepare import SMOLLM2

    # In a process of its own: reading GGUF takes a gigabyte, which tests of memory would otherwise find in theirs.
    subprocess.run([sys.executable, "-m", "demo.prepare"], cwd=ROOT, check=True, capture_output=True)
    return SMOLLM2


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face folder (BERT, float32, one file); read it only."""
    from demo.prepare import minilm_folder

    return minilm_folder()
