"""The suite for loaders, of checkpoints that torch itself writes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from weightloaders_dcp import DcpLoader, ShardedStateLoader

from weightloaders.testing import LoaderConformance
from weightloaders.testing.tiny import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")


class InThisProcess(LoaderConformance):
    """Starting a process that imports torch takes longer than all other checks."""

    @pytest.mark.slow
    def test_a_spawned_process_reads_the_same_values(self, tmp_path):
        super().test_a_spawned_process_reads_the_same_values(tmp_path)


class TestDcp(InThisProcess):
    loader = DcpLoader
    name = "dcp"

    def write_checkpoint(self, folder, tensors):
        dcp.save(dict(tensors), checkpoint_id=folder / "checkpoint", no_dist=True)
        return folder / "checkpoint"


class TestShardedState(InThisProcess):
    loader = ShardedStateLoader
    name = "sharded_state"
    dtypes = frozenset(DTYPES) - {torch.complex128}

    def write_checkpoint(self, folder, tensors):
        names = list(tensors)
        for part, some in enumerate((names[::2], names[1::2])):
            dense = {name: tensors[name].clone().contiguous() for name in some}
            save_file(dense, folder / f"model-rank-0-part-{part}.safetensors")
        return folder
