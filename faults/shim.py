"""The preloaded library, from within the process that it was preloaded into."""

from __future__ import annotations

import ctypes
import os
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import NamedTuple

#: Where the library lies that this process was started with.
VARIABLE = "FAULTS_SHIM"


class Call(IntFlag):
    """Kinds of system calls."""

    OPEN = 1
    READ = 2
    MAP = 4
    STAT = 8
    WRITE = 16
    SYNC = 32
    MOVE = 64
    REMOVE = 128
    MAKE = 256
    CLOSE = 512


class Action(IntEnum):
    """What happens at a call."""

    COUNT = 0
    FAIL = 1
    SHORTEN = 2
    SLOW = 3
    TRUNCATE = 4
    REPLACE = 5
    OVERWRITE = 6
    INTERRUPT = 7
    KILL = 8


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        name: What it is called in the counts.
        calls: At calls of which kinds it may happen.
        action: What happens.
        argument: For `Action.FAIL` the error's number, for `Action.SLOW` milliseconds, for damage to a file the place
            in it, in thousandths of its length.
        lasts: Whether it happens at every call from then on; else only once.
    """

    name: str
    calls: Call
    action: Action
    argument: int = 0
    lasts: bool = True


class Outcome(NamedTuple):
    """How often a fault came about, and how many calls there were that it might have come to."""

    injected: int
    calls: int


def build(folder: Path) -> Path:
    """Compile the library with the system's C compiler."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


class Shim:
    """Drives the library.

    Args:
        root: Only files below this folder are touched.
    """

    def __init__(self, root: Path) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        self._library.faults_arm.argtypes = (
            ctypes.c_uint, ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_char_p
        )  # fmt: skip
        self._library.faults_disarm.argtypes = (ctypes.POINTER(ctypes.c_long),)
        self._library.faults_disarm.restype = ctypes.c_long
        self._library.faults_root(os.fsencode(root))

    def arm(self, fault: Fault, at: int = 0, other: Path | None = None) -> None:
        """Let a fault happen at one of the calls to come.

        Args:
            fault: The fault.
            at: At which call, from 0 on.
            other: The file whose bytes come into a damaged one's place.
        """
        path = None if other is None else os.fsencode(other)
        self._library.faults_arm(fault.calls, fault.action, fault.argument, at, -1 if fault.lasts else 1, path)

    def disarm(self) -> Outcome:
        """Let nothing happen any more."""
        counted = ctypes.c_long()
        injected = self._library.faults_disarm(ctypes.byref(counted))
        return Outcome(injected, counted.value)
