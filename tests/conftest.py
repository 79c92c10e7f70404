"""What all tests share: a quiet, offline, single-threaded process, and the real models."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
for _name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "WEIGHTLOADERS_DISABLE", "WEIGHTLOADERS_STORAGE"):
    os.environ.pop(_name, None)
# A process in the background, or under nohup, ignores these, and so would all processes that tests start and stop.
for _signal, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _signal) and signal.getsignal(getattr(signal, _signal)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _signal), _handler)


def _is_third_party(distribution: metadata.Distribution) -> bool:
    points = distribution.read_text("entry_points.txt") or ""
    return "weightloaders." in points and distribution.name != "weightloaders"


_THIRD_PARTIES = {(d.name, str(d.locate_file(""))) for d in metadata.distributions() if _is_third_party(d)}


@pytest.fixture(scope="session")
def third_parties() -> str:
    """Plugins that happen to be installed, as `WEIGHTLOADERS_DISABLE` takes them, for processes that tests start."""
    return ",".join(name for name, _ in _THIRD_PARTIES)


@pytest.fixture(autouse=True)
def nothing_but_ours() -> Iterator[None]:
    """Plugins that happen to be installed are hidden from these tests; those that a test installs are not.

    For a test at a time: the plugins' own tests may run in the same process.
    """
    distributions = metadata.distributions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metadata,
            "distributions",
            lambda **where: (
                d for d in distributions(**where) if (d.name, str(d.locate_file(""))) not in _THIRD_PARTIES
            ),
        )
        yield


def pytest_unconfigure() -> None:
    shutil.rmtree(_hf_home, ignore_errors=True)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.accelerator.is_available():
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
