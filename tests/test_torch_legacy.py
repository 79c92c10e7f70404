"""Files of torch before 1.6: a pickle with the storages behind it; and those before that, which were tar archives."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightloaders import load_into, open_weights
from weightloaders.errors import CheckpointFormatError, WeightLoadersError
from weightloaders.loaders.torch import TorchLoader
from weightloaders.testing import LoaderConformance
from weightloaders.weights.reading import read_tensor
from weightloaders.weights.source import FileSource
from weightloaders.weights.torch_zip import read_torch

if TYPE_CHECKING:
    from pathlib import Path


class TestLegacyFiles(LoaderConformance):
    """The suite for loaders, of files in the old layout."""

    loader = TorchLoader

    @pytest.mark.slow
    def test_a_spawned_process_reads_the_same_values(self, tmp_path: Path) -> None:
        super().test_a_spawned_process_reads_the_same_values(tmp_path)

    def write_checkpoint(self, folder: Path, tensors: Any) -> Path:
        torch.save(dict(tensors), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        return folder


MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
SYSTEM = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


class _Tensor:
    """Pickles as a float tensor over a storage of the file."""

    def __init__(self, key: Any, numel: Any, shape: tuple[int, ...], offset: int = 0, view: Any = None) -> None:
        self.key, self.numel, self.shape, self.offset, self.view = key, numel, shape, offset, view

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(torch.empty(self.shape, device="meta").stride())
        return torch._utils._rebuild_tensor_v2, (_Storage(self), self.offset, self.shape, strides, False, OrderedDict())


class _Storage:
    def __init__(self, tensor: _Tensor) -> None:
        self.id = ("storage", torch.FloatStorage, tensor.key, "cpu", tensor.numel, tensor.view)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _Storage) else None


def legacy(root: Any, keys: Any, storages: bytes, version: Any = PROTOCOL) -> bytes:
    """A file as an old torch lays it out, around claims of one's own."""
    out = io.BytesIO()
    for part in (MAGIC, version, SYSTEM, root, keys):
        _Pickler(out, 2).dump(part)
    return out.getvalue() + storages


def counted(*numbers: float, count: int | None = None) -> bytes:
    """A storage: how many numbers there are, and the numbers."""
    return struct.pack(f"<q{len(numbers)}f", len(numbers) if count is None else count, *numbers)


def opened(folder: Path, data: bytes) -> dict[str, torch.Tensor]:
    (folder / "model.pt").write_bytes(data)
    return {info.name: read_tensor(info) for info in read_torch(FileSource(folder / "model.pt")).infos}


def test_the_hand_made_file_is_as_torch_reads_it(tmp_path: Path) -> None:
    root = {"w": _Tensor("7", 3, (3,)), "v": _Tensor("7", 3, (2,), 1), "x": _Tensor("3", 1, ())}
    data = legacy(root, ["3", "7"], counted(5.0) + counted(1.0, 2.0, 3.0))
    expected = {"w": torch.tensor([1.0, 2.0, 3.0]), "v": torch.tensor([2.0, 3.0]), "x": torch.tensor(5.0)}
    for found in (opened(tmp_path, data), torch.load(io.BytesIO(data), weights_only=True)):
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in expected.items()}


def test_views_of_a_storage_are_read_from_their_place(tmp_path: Path) -> None:
    root = {"w": _Tensor("0", 4, (2,), view=("part", 1, 2))}
    data = legacy(root, ["0"], counted(1.0, 2.0, 3.0, 4.0))
    assert opened(tmp_path, data)["w"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin"])
def test_a_legacy_file_loads_into_a_model_with_its_ties(tmp_path: Path, name: str) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    saved[1].weight = saved[0].weight
    torch.save(saved.state_dict(), tmp_path / name, _use_new_zipfile_serialization=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    report = load_into(model, tmp_path)
    assert not report.missing
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    with open_weights(tmp_path) as weights:
        assert weights.info("0.weight").extents == weights.info("1.weight").extents


HUGE = 1 << 40
W = {"w": _Tensor("0", 3, (3,))}
THREE = counted(1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("root", "keys", "storages"),
    [
        (W, ["0"], THREE[:-1]),
        (W, ["0"], b""),
        (W, ["0"], THREE[:4]),
        (W, ["0"], counted(1.0, 2.0, 3.0, count=2)),
        (W, ["0"], counted(1.0, 2.0, 3.0, count=HUGE)),
        (W, ["0"], counted(1.0, 2.0, 3.0, count=-3)),
        (W, [], THREE),
        (W, ["1"], THREE),
        (W, ["0", "0"], THREE * 2),
        (W, ["0", "1"], THREE * 2),
        (W, [0.5], THREE),
        (W, [None], THREE),
        (W, {"0": 1}, THREE),
        (W, "0", THREE),
        ({"w": _Tensor("0", HUGE, (HUGE,))}, ["0"], THREE),
        ({"w": _Tensor("0", 1 << 62, (3,))}, ["0"], THREE),
        ({"w": _Tensor("0", -3, (3,))}, ["0"], THREE),
        ({"w": _Tensor("0", 3, (4,))}, ["0"], THREE),
        ({"w": _Tensor("0", 3, (3,), 1)}, ["0"], THREE),
        ({"w": _Tensor("0", 3, (3,), view=("v", 2, 3))}, ["0"], THREE),
        ({"w": _Tensor("0", 3, (3,), view=("v", -1, 3))}, ["0"], THREE),
        ({"w": _Tensor("0", "3", (3,))}, ["0"], THREE),
        ({"w": _Tensor(("0",), 3, (3,))}, ["0"], THREE),
        ({"w": _Tensor("0", 3, (3,)), "x": _Tensor("0", 2, (2,))}, ["0"], THREE),
    ],
)
def test_a_file_that_lies_about_its_storages_is_refused(tmp_path: Path, root: Any, keys: Any, storages: bytes) -> None:
    with pytest.raises(CheckpointFormatError):
        opened(tmp_path, legacy(root, keys, storages))


@pytest.mark.parametrize("version", [1000, "1001", None, [PROTOCOL]])
def test_another_version_of_the_layout_is_refused(tmp_path: Path, version: Any) -> None:
    with pytest.raises(CheckpointFormatError, match="no valid file of an old torch"):
        opened(tmp_path, legacy(W, ["0"], THREE, version))


@pytest.mark.parametrize("where", ["keys", "storage"])
def test_a_name_that_would_be_endless_as_text_is_refused_at_once(tmp_path: Path, where: str) -> None:
    name: Any = ["x"]
    for _ in range(60):
        name = [name, name]
    root, keys = (W, [name]) if where == "keys" else ({"w": _Tensor(name, 3, (3,))}, ["0"])
    with pytest.raises(WeightLoadersError):
        opened(tmp_path, legacy(root, keys, THREE))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_key_that_nobody_could_hash_is_refused_at_once(tmp_path: Path, legacy: bool) -> None:
    """Tuples of tuples of tuples, which share their parts, as keys of a dict."""
    bomb = b"\x80\x02}q\x00(K\x01)q\x01" + b"h\x01h\x01\x86q\x01" * 60 + b"u."
    if legacy:
        start = b"".join(pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, SYSTEM))
        (tmp_path / "model.pt").write_bytes(start + bomb)
    else:
        with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
            archive.writestr("model/data.pkl", bomb)
    with pytest.raises(CheckpointFormatError, match="without end"):
        open_weights(tmp_path / "model.pt")


def test_tuples_that_are_referred_to_again_are_no_matter(tmp_path: Path) -> None:
    shared = (1, (2, 3))
    content = {"state_dict": {"w": torch.ones(2)}, "shared": [shared] * 5000}
    torch.save(content, tmp_path / "model.pt")
    assert list(open_weights(tmp_path / "model.pt")) == ["w"]


def test_a_tar_archive_is_told_for_what_it_is_with_the_way_to_save_it_anew(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "model.pt", "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(CheckpointFormatError, match="first releases of torch") as refused:
        open_weights(tmp_path / "model.pt")
    assert "weights_only=False" in (refused.value.hint or "")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_files_of_another_pickle_protocol_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4), "b": torch.randn(3).bfloat16()}
    path = tmp_path / "model.bin"
    torch.save(tensors, path, pickle_protocol=3, _use_new_zipfile_serialization=False)
    with open_weights(str(path)) as weights:
        read = dict(weights)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in torch.load(path, weights_only=True).items())


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_protocol_that_torch_does_not_read_weights_only_is_named(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.bin"
    torch.save({"w": torch.ones(2)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightLoadersError, match="uses a pickle protocol that torch does not read weights-only"):
        open_weights(str(path))
