"""Readers with faults, given to the fuzzing harness; prints what it says of each. Run by test_fuzzing.py."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path

import torch

from fuzz import child
from fuzz.running import fuzz
from fuzz.target import FaultError, Target
from weightloaders import TensorInfo, Weights
from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.source import FileSource


class Planted(Target):
    def seeds(self):
        return [{"file": bytes(8)}]

    def mutated(self, files, mutator, others):
        return {"file": mutator.data(files["file"])}

    def read(self, folder, files):
        if files["file"] != bytes(8):
            self.reads(folder)

    def reads(self, folder):
        raise NotImplementedError


class Sound(Planted):
    def reads(self, folder):
        raise CheckpointFormatError("refused")


class Foreign(Planted):
    def reads(self, folder):
        raise KeyError("a foreign exception")


class Crash(Planted):
    def reads(self, folder):
        os.abort()


class Hang(Planted):
    def reads(self, folder):
        time.sleep(60)


class Spin(Planted):
    def reads(self, folder):
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass


class Memory(Planted):
    def reads(self, folder):
        bytearray(200 << 20)


class Absurd(Planted):
    def reads(self, folder):
        try:
            torch.empty(1 << 40)
        except RuntimeError as error:
            raise CheckpointFormatError("there is not enough memory") from error


class Outside(Planted):
    def reads(self, folder):
        Path("/etc/hosts").read_bytes()


class Writes(Planted):
    def reads(self, folder):
        (folder.parent.parent / "planted").write_text("")


class _Payload:
    def __reduce__(self):
        return os.system, ("true",)


class Pickle(Planted):
    def reads(self, folder):
        pickle.loads(pickle.dumps(_Payload()))


class Control(Planted):
    def reads(self, folder):
        raise ControlError("a tensor is called \x1b[2J")


class ControlError(CheckpointFormatError):
    def __str__(self):
        return self.message


class Lies(Planted):
    def reads(self, folder):
        info = TensorInfo("a", torch.float32, (2,), read=lambda: torch.rand(2), sources=[FileSource(folder / "file")])
        self.take(Weights.describe([info]), folder, {})


class Differs(Planted):
    def reads(self, folder):
        raise FaultError("another reader has another verdict")


def main() -> None:
    folder = Path(sys.argv[1])
    said = {}
    child.MOST_SECONDS = 0.3
    for kind in Planted.__subclasses__():
        kind.name = kind.__name__
        result = fuzz(kind(), 2, 0, folder / kind.name, limit=1.0 if kind is Hang else 60.0)
        said[kind.name] = {
            "executions": result.executions,
            "refused": result.refused,
            "faults": result.faults,
            "problems": [path.with_name(f"{path.name}.txt").read_text() for path in result.kept],
            "kept": [[file.name for file in path.iterdir()] for path in result.kept],
        }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
