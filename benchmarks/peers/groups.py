"""What is held side by side: a workload, the state of memory and page cache, and the ways that suit it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.ways import (
    FROM_PRETRAINED,
    LIMIT_DIRECT,
    LIMIT_FRESH,
    LIMIT_TOUCHED,
    OUR_FROM_PRETRAINED,
    OURS,
    OURS_RAW,
    SAFE_OPEN,
    STRUCT,
)

# These are measured in each round, the others in about every second: what the last table compares needs more rounds.
CORE = (OURS, OURS_RAW, SAFE_OPEN, LIMIT_FRESH, LIMIT_DIRECT)

_COPIED = (SAFE_OPEN, "load_file + load_state_dict", "Run:ai streamer + copy_", "fastsafetensors + copy_")
_TORCH = ("torch.load + load_state_dict", "torch.load(mmap=True) + load_state_dict")
_FILLED = ("accelerate load_checkpoint_in_model", "tensorizer")
_WHOLE = (OUR_FROM_PRETRAINED, FROM_PRETRAINED)
_HUGE_PAGES = "safe_open + copy_, huge pages"


@dataclass(frozen=True)
class Group:
    """One table.

    Attributes:
        workload: Name of a workload.
        ways: Names of ways.
        memory: ``"fresh"`` or ``"touched"``.
        cache: ``"warm"`` or ``"cold"``.
        condition: Under which it is run; `ADDRESS_SPACE`, `DESCRIPTORS`, `BUSY`, or none.
        drawn: Whether it has a panel in the chart.
    """

    workload: str
    ways: tuple[str, ...]
    memory: str = "fresh"
    cache: str = "warm"
    condition: str = ""
    drawn: bool = False

    @property
    def key(self) -> str:
        """What identifies it."""
        return ", ".join(filter(None, (self.workload, self.cache, self.memory, self.condition)))


ADDRESS_SPACE = "with no more address space than the model and 512 MiB"
DESCRIPTORS = "with 40 open files"
BUSY = "beside two busy processes"

GROUPS = (
    Group("dense", (LIMIT_TOUCHED, LIMIT_FRESH, OURS, "weightloaders, mmap", "weightloaders, from .bin", *_WHOLE,
                    *_COPIED, _HUGE_PAGES, *_FILLED, *_TORCH), drawn=True),
    Group("dense", (LIMIT_TOUCHED, OURS, *_COPIED, "accelerate load_checkpoint_in_model", _TORCH[1]), memory="touched"),
    Group("dense", (LIMIT_DIRECT, OURS, "weightloaders, o_direct", "weightloaders, mmap", FROM_PRETRAINED, *_COPIED,
                    *_FILLED, _TORCH[1]), cache="cold", drawn=True),
    Group("fused", (LIMIT_FRESH, OURS, *_COPIED, _HUGE_PAGES, _TORCH[1]), drawn=True),
    Group("experts", (LIMIT_FRESH, OURS, *_WHOLE, *_COPIED, _HUGE_PAGES), drawn=True),
    Group("experts", (LIMIT_DIRECT, OURS, FROM_PRETRAINED, *_COPIED), cache="cold"),
    Group("f32", (LIMIT_FRESH, OURS, *_WHOLE, *_COPIED, _TORCH[1]), drawn=True),
    Group("f16", (LIMIT_FRESH, OURS, *_COPIED)),
    Group("transposed", (LIMIT_FRESH, OURS, *_COPIED, _TORCH[1]), drawn=True),
    Group("raw", (LIMIT_FRESH, OURS_RAW, STRUCT, "numpy.fromfile + copy_", "numpy.memmap + copy_"), drawn=True),
    # tensorizer has no room in its index for so many names.
    Group("small", (LIMIT_FRESH, OURS, *_COPIED, "accelerate load_checkpoint_in_model", *_TORCH), drawn=True),
    Group("huge", (LIMIT_FRESH, OURS, *_COPIED, _HUGE_PAGES, *_FILLED, *_TORCH)),
)  # fmt: skip

# What a peer does under these shows whether being ahead is a matter of a quiet machine.
ROBUST = (
    Group("dense", (OURS, SAFE_OPEN, "Run:ai streamer + copy_"), condition=ADDRESS_SPACE),
    Group("shards", (OURS, SAFE_OPEN, "Run:ai streamer + copy_"), condition=DESCRIPTORS),
    Group("dense", (OURS, SAFE_OPEN, "load_file + load_state_dict"), condition=BUSY),
    Group("experts", (OURS, SAFE_OPEN), condition=BUSY),
    Group("f32", (OURS, SAFE_OPEN), condition=BUSY),
)
