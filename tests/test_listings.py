"""Formats are read from listings of byte sources, wherever these lie, by the loaders that read them from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

import weightloaders as wl
from weightloaders import LLM, BaseWeightLoader, ByteSource, FolderListing, Probe, Weights, from_pretrained
from weightloaders.errors import CheckpointFormatError, ModelError, SourceNotFoundError, SourceReadError
from weightloaders.loaders.resolve import fetch_model_files
from weightloaders.testing import isolated_registry
from weightloaders.weights.raw import write_raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class Memory(ByteSource):
    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content = name, content

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def identity(self) -> int:
        return hash(self.content)

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self.content[offset : offset + len(view)]


@dataclass
class Shelf:
    """Files that lie on no disk."""

    files: dict[str, bytes]
    where: str = "shelf://7"
    odd: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.files)

    def problems(self, names: Any) -> dict[str, str]:
        return {name: "is not there" for name in names if name not in self.files}

    def read(self, name: str) -> bytes:
        return self.files[name]

    def open(self, name: str) -> ByteSource:
        return Memory(f"{self.where}/{name}", self.files[name])

    def subfolders_with_weights(self) -> list[str]:
        return []


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.c": torch.tensor([1, -2], dtype=torch.int64)}


def shelf_of(folder: Path) -> Shelf:
    return Shelf({path.name: path.read_bytes() for path in folder.iterdir()})


@pytest.fixture(params=["safetensors", "one safetensors", "torch", "one torch", "binary", "one binary"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Shelf, str, str]:
    """Files, the name of the one that is asked for, and who should read them."""
    kind = request.param.removeprefix("one ")
    if kind == "safetensors":
        name = "model.safetensors"
        (tmp_path / name).write_bytes(save(TENSORS))
    elif kind == "torch":
        name = "pytorch_model.bin"
        torch.save(TENSORS, tmp_path / name)
    else:
        name = "model.bin"
        write_raw(
            tmp_path, [wl.TensorInfo(n, t.dtype, t.shape, read=lambda t=t: t) for n, t in TENSORS.items()], TENSORS.get
        )
    one = request.param.startswith("one ")
    reader = {"safetensors": "local" if one else "hf", "torch": "torch" if one else "hf"}.get(kind, "binary")
    return shelf_of(tmp_path), name if one else "", reader


def same(weights: Any) -> bool:
    with weights:
        return weights.keys() == TENSORS.keys() and all(torch.equal(weights[n], t) for n, t in TENSORS.items())


def test_a_format_is_recognised_and_read_wherever_its_files_lie(shelf: tuple[Shelf, str, str]) -> None:
    files, name, reader = shelf
    auto: Any = wl.WeightLoaderRegistry.create("auto")
    assert auto.choose_for(files, name)._created_as[0] == reader
    assert same(auto.get_listed_weights(files, name))


def test_a_loader_reads_a_folder_on_disk_as_it_reads_its_listing(shelf: tuple[Shelf, str, str], tmp_path: Path) -> None:
    _, name, reader = shelf
    loader = wl.WeightLoaderRegistry.create(reader)
    assert same(loader.get_weights(str(tmp_path / name)))
    assert same(loader.get_listed_weights(FolderListing(tmp_path), name))


def test_options_of_the_chosen_loader_count(tmp_path: Path) -> None:
    files = Shelf({"model.safetensors": save(TENSORS), "other.safetensors": save({"x": torch.ones(1)})})
    loader = wl.WeightLoaderRegistry.create("auto", file_pattern="other*")
    with loader.get_listed_weights(files) as weights:
        assert set(weights) == {"x"}


def test_what_nobody_reads_is_refused_with_what_each_said_and_what_to_install() -> None:
    auto = wl.WeightLoaderRegistry.create("auto")
    with pytest.raises(SourceNotFoundError, match="there is no file in it"):
        auto.get_listed_weights(Shelf({}))
    with pytest.raises(
        SourceNotFoundError, match=r"(?s)shelf://7: no loader recognises what is in it\n.*local: "
    ) as caught:
        auto.get_listed_weights(Shelf({"a.txt": b"x", "model.gguf": b"GGUF"}))
    assert caught.value.hint == "pip install weightloaders-gguf"
    with pytest.raises(CheckpointFormatError, match=r"no loader recognises shelf://7/model\.npz") as refused:
        auto.get_listed_weights(Shelf({"model.npz": b"PK"}), "model.npz")
    assert refused.value.hint == "pip install weightloaders-npz"


def test_a_loader_that_reads_paths_only_says_so() -> None:
    loader = wl.WeightLoaderRegistry.create("dummy")
    with pytest.raises(SourceReadError, match="shelf://7 can't be read: DummyLoader reads only files on disk"):
        loader.get_listed_weights(Shelf({}))


# ------------------------------------------------------------------ config and tokenizer from a loader


class ShelfLoader(BaseWeightLoader):
    """Reads what lies at shelf://; its config it writes down where it is asked for."""

    folder: Path
    files: Shelf
    asked: list[tuple[str, str]]

    def get_weights(self, model_name_or_path: str) -> Weights:
        reader = wl.WeightLoaderRegistry.create("auto")
        return reader.get_listed_weights(self.files)

    def get_model_files(self, model_name_or_path: str, needed: str = "") -> Path:
        self.asked.append((model_name_or_path, needed))
        return self.folder

    @classmethod
    def probe(cls, path: str) -> Probe:
        return Probe.yes() if path.startswith("shelf://") else Probe.no()


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LlamaForCausalLM]:
    """A model whose config is in one place, and its weights in another, both of which only one loader knows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "config").mkdir()
    (tmp_path / "weights" / "config.json").rename(tmp_path / "config" / "config.json")
    ShelfLoader.folder, ShelfLoader.asked = tmp_path / "config", []
    ShelfLoader.files = shelf_of(tmp_path / "weights")
    with isolated_registry() as registry:
        registry.register("shelf", ShelfLoader)
        yield model


def test_a_loader_says_where_the_config_of_what_it_reads_lies(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    model, report = from_pretrained("shelf://7", progress=False)
    assert ShelfLoader.asked == [("shelf://7", "config.json")]
    assert report.loader == "shelf"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), llama.parameters(), strict=True))
    # A place that weights don't lie at is asked about, too.
    model, _ = from_pretrained(None, weights="shelf://7", config="shelf://8", progress=False)
    assert ShelfLoader.asked[1:] == [("shelf://8", "config.json")]
    assert torch.equal(model.lm_head.weight, llama.lm_head.weight)


def test_the_tokenizer_is_where_the_loader_says(llama: LlamaForCausalLM, minilm_folder: Path, tmp_path: Path) -> None:
    for file in minilm_folder.glob("*token*"):
        (tmp_path / "config" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config" / "vocab.txt").write_bytes((minilm_folder / "vocab.txt").read_bytes())
    llm = LLM("shelf://7", progress=False)
    assert llm.tokenizer is not None
    assert {place for place, _ in ShelfLoader.asked} == {"shelf://7"}


def test_where_no_file_can_be_kept_that_is_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Shelf({"config.json": b"{}"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"shelf://7 can't be written to a temporary folder") as caught:
        fetch_model_files(files)
    assert caught.value.file == "shelf://7"
    assert "TMPDIR" in str(caught.value)
