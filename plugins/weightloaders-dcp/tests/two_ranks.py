"""Becomes two processes, which form a group: each has its part of some tensors, and saves it by torch's own means.

``whole.pt`` has the tensors before they were cut.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder = Path(sys.argv[1])
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

torch.manual_seed(0)
whole = {
    "rows": torch.randn(6, 4),
    "columns": torch.randn(4, 6, dtype=torch.bfloat16),
    "uneven": torch.randn(5, 3),
    "one_row": torch.randn(1, 3),
    "replicated": torch.randn(3, 3),
    "plain": torch.arange(7),
    "middle": torch.randn(2, 4, 3, dtype=torch.float64),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}
placements = {
    "rows": Shard(0),
    "columns": Shard(1),
    "uneven": Shard(0),
    "one_row": Shard(0),
    "replicated": Replicate(),
    "middle": Shard(1),
}
parts = {
    name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor
    for name, tensor in whole.items()
}

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 6)).sum().backward()
optimizer.step()
fsdp = {f"fsdp.{name}": tensor.full_tensor() for name, tensor in get_model_state_dict(model).items()}

dcp.save({"model": parts, "optimizer": {"state": parts}, "step": 3}, checkpoint_id=folder / "nested")
dcp.save({"model": get_model_state_dict(model), "optim": optimizer.state_dict()}, checkpoint_id=folder / "fsdp")
dcp.save(parts, checkpoint_id=folder / "several-files", storage_writer=dcp.FileSystemWriter(
    folder / "several-files", single_file_per_rank=False))  # fmt: skip
# As torch's older FSDP has it.
begin, end = (0, 4) if rank == 0 else (4, 6)
place = ShardMetadata(shard_offsets=[begin, 0], shard_sizes=[end - begin, 4], placement=f"rank:{rank}/cpu")
older = init_from_local_shards([ShardOfTensor(whole["rows"][begin:end].clone(), place)], 6, 4)
dcp.save({"model": {"rows": older}}, checkpoint_id=folder / "older")
dcp.save({"model": parts}, checkpoint_id=folder / "own-metadata", use_collectives=False)
shards = {name: tensor for name, tensor in parts.items() if name not in ("empty", "one_row")}
dcp.save(shards, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))
dcp.save(shards, storage_writer=dcp.FileSystemWriter(
    folder / "safetensors", serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS))  # fmt: skip

if rank == 0:
    torch.save({**whole, **fsdp}, folder / "whole.pt")
dist.barrier()
dist.destroy_process_group()
if child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
    sys.exit("rank 1 failed")
