"""What `torch.save` writes, then and now; and pickles, changed so that they mean harm."""

from __future__ import annotations

import functools
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from fuzz.archives import Member, members_of, mutated_archive, put_together
from fuzz.target import Files, Target, sound_tensors
from weightloaders.loaders.torch import TorchLoader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fuzz.mutate import Mutator

# What a pickle that means harm is made of: what it calls, and how.
_PAYLOADS = (
    b"cos\nsystem\n(S'touch /tmp/pwned'\ntR", b"cposix\nsystem\n", b"cbuiltins\nexec\n(S'import os; os.getcwd()'\ntR",
    b"c__builtin__\neval\n(S'1/0'\ntR", b"csubprocess\nPopen\n(](S'id'\nltR", b"\x8c\x02os\x8c\x06system\x93",
    b"cbuiltins\ngetattr\n", b"cbuiltins\nopen\n(S'/tmp/pwned'\nS'w'\ntR", b"ctorch\nload\n", b"ctorch.hub\nload\n",
    b"cnumpy\nload\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n", b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n",
    b"ctorch._utils\n_rebuild_wrapper_subclass\n", b"ctorch\nfloat32\n", b"ctorch\nbfloat16\n", b"ctorch\nSize\n",
    b"ctorch.nn.parameter\nParameter\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nTensor\n",
    b"ctorch\nqint8\n",
    b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n", b"ctorch\ndevice\n", b"cbuiltins\nbytearray\n",
    b"c_codecs\nencode\n",
    b"ctorch._utils\n_rebuild_qtensor\n", b"ctorch._utils\n_rebuild_nested_tensor\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"X\x01\x00\x00\x00a", b"(", b"t", b"l", b"d", b"}", b"]", b")", b"R", b"b", b"s", b"u", b"a", b"e", b"Q",
    b"0", b"1", b"2",
    b"\x81", b"\x92", b"\x85", b"\x86", b"\x87", b"N", b"\x88", b"\x89", b"\x94", b"h\x00", b"h\x01", b"q\x00",
    b"j\xff\xff\xff\x7f",
    b"r\xff\xff\xff\xff", b"K\x00", b"M\xff\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"\x8a\xff" + b"\x7f" * 255, b"\x8b\x00\x00\x00\x10", b"G" + b"\x7f\xf0" + bytes(6), b"I1\n", b"L1L\n",
    b"S'a'\n", b"V\\u0000\n",
    b"B\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 7 + b"\x7f", b"\x8e" + b"\xff" * 8,
    b"\x96" + b"\xff" * 8,
    b"\x95" + b"\xff" * 8, b"\x80\x05", b"\x82\x01", b"\x83\x01\x00", b"P0\n", b"\x97", b"\x98", b"\x90", b"\x91",
    b"\x8f", b".", b"o",
    b"ios\nsystem\n",
)  # fmt: skip


def changed_pickle(data: bytes, mutator: Mutator, others: Sequence[bytes] = ()) -> bytes:
    """A pickle with a number replaced by one of another size, or changed like any bytes."""
    rng = mutator.rng
    if rng.random() < 0.4:
        places = [i for i in range(len(data) - 1) if data[i] in b"KMJ"]
        if places:
            at = rng.choice(places)
            length = {0x4B: 2, 0x4D: 3, 0x4A: 5}[data[at]]
            return data[:at] + _pickled_number(mutator.number()) + data[at + length :]
    return mutator.data(data, _PAYLOADS, others)


def _pickled_number(value: int) -> bytes:
    """A number as a pickle has it."""
    return pickle.dumps(value, 2)[2:-1]


class _TorchTarget(Target):
    def read(self, folder: Path, files: Files) -> None:
        """By the loader for torch's files."""
        self.take(TorchLoader().get_weights(str(folder / "model.pt")), folder, files)


def _saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _torch_values() -> list[Any]:
    base = torch.arange(24, dtype=torch.float32)
    return [
        sound_tensors(),
        {"state_dict": {"a": base[:2]}, "epoch": 3},
        {"t": base.view(4, 6).t(), "s": base[1::2]},
        {"e": base[:1].expand(3, 2), "z": base[:0]},
        {"p": torch.nn.Parameter(torch.ones(2))},
        {"h": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(2, dtype=torch.complex64).conj()},
        {"sp": torch.eye(3).to_sparse()},
        {"csr": torch.eye(2).to_sparse_csr()},
        {"u": torch.zeros(2, dtype=torch.uint16), "f": torch.tensor([True, False])},
    ]


class TorchZip(_TorchTarget):
    """Files that `torch.save` writes."""

    name = "torch-zip"

    _NAMES = (
        b"archive/data.pkl", b"archive/byteorder", b"archive/data/0", b"archive/data/1", b"archive/data/2",
        b"archive/version",
        b"archive/constants.pkl", b"archive/.data/serialization_id", b"../data.pkl", b"/etc/data.pkl",
        b"archive/data/", b"",
        b"other/data.pkl", b"archive\\data\\0", b"archive/data/0\x00", b"\xff\xfe",
    )  # fmt: skip

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Sound files, some with records deflated."""
        made = []
        for value in _torch_values():
            members = [m for m in members_of(_saved(value)) if not m.name.endswith((b"version", b"_id"))]
            root = members[0].name.split(b"/")[0]
            members = [Member(m.name.replace(root, b"archive", 1), m.data) for m in members]
            made.append(put_together(members, 64))
            if len(made) == 1:
                made.append(put_together([Member(m.name, m.data, 8) for m in members]))
        return [{"model.pt": data} for data in made]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """Its records, above all the pickle; or the file as bytes."""
        data = files["model.pt"]
        if mutator.rng.random() < 0.2:
            return {
                "model.pt": mutator.data(
                    data, (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
                )
            }
        parts = [o["model.pt"] for o in others[:20]]
        return {"model.pt": mutated_archive(data, mutator, functools.partial(_record, mutator, parts), self._NAMES, 64)}


def _record(mutator: Mutator, others: Sequence[bytes], member: Member) -> bytes:
    if member.name.endswith(b"data.pkl"):
        return changed_pickle(member.data, mutator, others)
    return mutator.data(member.data, (b"little", b"big"))


class TorchLegacy(_TorchTarget):
    """Files of torch before 1.6."""

    name = "torch-legacy"

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Sound files."""
        options = {"_use_new_zipfile_serialization": False}
        return [{"model.pt": _saved(value, **options)} for value in _torch_values()]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """Behind the magic number, pickles and counts."""
        data = files["model.pt"]
        kept = 15 if mutator.rng.random() < 0.97 else 0
        return {"model.pt": data[:kept] + changed_pickle(data[kept:], mutator, [o["model.pt"] for o in others[:20]])}
