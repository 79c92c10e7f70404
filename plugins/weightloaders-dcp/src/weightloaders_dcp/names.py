"""How the files of these formats are called."""

from __future__ import annotations

import re

METADATA = ".metadata"
SUFFIX = ".distcp"
# Each rank writes its own metadata where `use_collectives=False` was given.
METADATA_OF_RANK = re.compile(r"__(\d{1,7})\.metadata")
# As `torch/distributed/checkpoint/_hf_utils.py` has it: by rank, by file, and how many files a rank has.
SHARD = re.compile(r"shard-(\d{1,7})-model-(\d{1,7})-of-(\d{1,7})\.safetensors")


def is_of_dcp(name: str) -> bool:
    """Whether a file is called as DCP calls its own."""
    return name == METADATA or name.endswith(SUFFIX) or METADATA_OF_RANK.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether a file is called as `HuggingFaceStorageWriter` calls a rank's part."""
    return SHARD.fullmatch(name) is not None
