"""What other loaders let through, or refuse late, is refused here from headers alone, in words, and nothing is touched.

The table is `benchmarks.wrecks`; `benchmarks/refusals.py` measures it.
"""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, MixtralForCausalLM

from benchmarks import wrecks
from weightloaders import load_into
from weightloaders.errors import CoverageError, LoadError, PlanError, SourceError
from weightloaders.loading import load_status
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
# What each message must say: what, where, and what to do.
LLAMA: dict[str, tuple[str, ...]] = {
    "an o_proj is missing": (
        f"1 of 21 parameters is not in the source: {wrecks.O_PROJ}", "model-00002-of-00003.safetensors",
        "the checkpoint is incomplete: fetch or export it again",
    ),
    "a k_proj is missing": (
        f"1 of 21 parameters is not in the source: {wrecks.K_PROJ}", "model-00002-of-00003.safetensors",
        "the checkpoint is incomplete: fetch or export it again",
    ),
    "all linear layers of a layer are missing": (
        "7 of 21 parameters are not in the source: model.layers.1.self_attn.* (4), model.layers.1.mlp.* (3)",
        "the checkpoint is incomplete: fetch or export it again",
    ),
    "embed_tokens is missing": (
        f"1 of 21 parameters is not in the source: {wrecks.EMBED}", "model-00001-of-00003.safetensors",
        "the checkpoint is incomplete: fetch or export it again",
    ),
    "all names have another prefix": (
        "21 of 21 parameters are not in the source", "differ by a prefix", "rules=[Rename('backbone', 'model')]",
    ),
    "a q_proj is twice as large": (
        f"{wrecks.Q_PROJ}: the source has [32, 16], the model wants [16, 16]", "model-00002-of-00003.safetensors",
        "of another size", "config.json",
    ),
    "a k_proj is of another shape": (
        f"{wrecks.K_PROJ}: the source has [7, 16], the model wants [8, 16]", "model-00002-of-00003.safetensors",
        "of another size", "config.json",
    ),
    "the vocabulary is smaller": (
        f"{wrecks.EMBED}: the source has [60, 16], the model wants [64, 16]", "vocabularies of 60 and 64",
        "vocab_size=60", "resize_token_embeddings(60)", "pad_rows",
    ),
    "an o_proj holds integers": (
        f"{wrecks.O_PROJ}: the source has torch.int8 values, which can't become torch.bfloat16 by a cast",
        "model-00002-of-00003.safetensors", "usually quantised weights", "quantization_config",
    ),
    "the index omits a shard": (
        "1 of 21 parameters is not in the source: lm_head.weight",
        "model-00003-of-00003.safetensors: present but not in model.safetensors.index.json",
        "include_unindexed=True takes it",
    ),
    "the index names the wrong files": (
        "model.safetensors.index.json says that tensor 'lm_head.weight' is in model-00001-of-00003.safetensors",
        "that file does not hold it", "fetch both again",
    ),
    "a shard is absent": (
        "model-00003-of-00003.safetensors is not there", "1 of its 21 tensors should be in there",
        "fetch what is missing",
    ),
    "a shard is truncated": (
        "model-00003-of-00003.safetensors is truncated", "100 are missing, from tensor 'lm_head.weight' on",
        "fetch the file again",
    ),
    "a header is damaged": ("model-00001-of-00003.safetensors has a header that is not valid JSON", "fetch it again"),
    "a header claims to be a terabyte long": (
        "model-00001-of-00003.safetensors claims a header of 1099511627776 bytes", "fetch it again",
    ),
    "two tensors have one place": (
        f"model-00002-of-00003.safetensors has tensor '{wrecks.O_PROJ}' at bytes", "the header is damaged", "fetch",
    ),
    "a shard is a Git LFS pointer": (
        "model-00001-of-00003.safetensors is not a safetensors file: it is a Git LFS pointer", "git lfs pull",
    ),
    "two files differ in one tensor": (
        "is in model-00001-of-00003.safetensors and in model-00003-of-00003.safetensors, with different values",
        "different checkpoints",
    ),
}  # fmt: skip
MIXTRAL: dict[str, tuple[str, ...]] = {
    "an expert's w1 is missing": (
        f"the parts of {GATE_UP} don't pair: .experts.*.w1.weight has no 3", "model-00002-of-00003.safetensors",
        "in a shard that is absent",
    ),
    "expert 3 is called 7": (
        "the index 3 is missing: next is 'model.layers.1.block_sparse_moe.experts.7.w1.weight'",
        "model-00002-of-00003.safetensors", "under another name",
    ),
    "an expert's w1 is of another shape": (
        f"{GATE_UP}: ", f"'{wrecks.EXPERT}' has [31, 16], where others of .experts.*.w1.weight have [32, 16]",
        "fetch or export it again",
    ),
    "an expert's w1 holds integers": (
        f"{GATE_UP}: one of the tensors .experts.*.w1.weight has torch.int8 values", "quantization_config",
    ),
    "a layer's experts are missing": (
        "2 of 21 parameters are not in the source: model.layers.1.mlp.experts.* (2)",
        "the checkpoint is incomplete: fetch or export it again",
    ),
    "a router is missing": (
        "1 of 21 parameters is not in the source: model.layers.1.mlp.gate.weight",
        "the checkpoint is incomplete: fetch or export it again",
    ),
}  # fmt: skip
# Whether two files that hold one name hold one tensor is the only thing that headers can't tell.
READS_DATA = {"two files differ in one tensor"}
TABLE = [
    pytest.param(kind, name, words, id=f"{kind}: {name}")
    for kind, table in (("llama", LLAMA), ("mixtral", MIXTRAL))
    for name, words in table.items()
]


def test_the_table_and_its_measurement_have_the_same_rows() -> None:
    assert list(LLAMA) == list(wrecks.LLAMA)
    assert list(MIXTRAL) == list(wrecks.MIXTRAL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for kind in ("llama", "mixtral"):
        wrecks.write_model(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def models(whole: Path) -> dict[str, nn.Module]:
    """A model of each kind that has values already."""
    return {
        "llama": LlamaForCausalLM.from_pretrained(whole / "llama"),
        "mixtral": MixtralForCausalLM.from_pretrained(whole / "mixtral"),
    }


@pytest.fixture
def spoilt(whole: Path, tmp_path: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    def make(kind: str, spoil: Callable[[Path], object]) -> Path:
        folder = shutil.copytree(whole / kind, tmp_path / kind)
        spoil(folder)
        return folder

    return make


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files that were read, and how far."""
    done: list[tuple[str, int]] = []
    read_into = FileSource.read_into

    def watched(self: FileSource, view: memoryview, offset: int) -> None:
        done.append((self.name, offset + len(view)))
        read_into(self, view, offset)

    monkeypatch.setattr(FileSource, "read_into", watched)
    return done


def digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for tensor in model.state_dict(keep_vars=True).values():
        hashed.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def read_of_data(folder: Path, reads: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """What was read behind the headers; but the first page may be looked at to tell what a file is."""
    begins = {}
    for file in wrecks.shards(folder):
        with file.open("rb") as opened:
            begins[str(file)] = max(4096, 8 + int.from_bytes(opened.read(8), "little"))
    return [(name, end) for name, end in reads if name.endswith(".safetensors") and end > begins[name]]


@pytest.mark.parametrize(("kind", "name", "words"), TABLE)
def test_what_others_let_through_is_refused_from_headers_alone_and_nothing_is_touched(
    kind: str,
    name: str,
    words: tuple[str, ...],
    models: dict[str, nn.Module],
    spoilt: Callable[[str, Callable[[Path], object]], Path],
    reads: list[tuple[str, int]],
) -> None:
    folder = spoilt(kind, {"llama": wrecks.LLAMA, "mixtral": wrecks.MIXTRAL}[kind][name])
    before = digest(models[kind])
    with pytest.raises((PlanError, SourceError)) as caught:
        load_into(models[kind], folder, progress=False)
    assert not isinstance(caught.value, LoadError)
    message = str(caught.value)
    for part in words:
        assert part in message, message
    # It names a file that one can look at.
    assert caught.value.file is not None
    assert str(caught.value.file) in message
    assert digest(models[kind]) == before
    assert load_status(models[kind]) is None
    assert reads
    if name not in READS_DATA:
        assert read_of_data(folder, reads) == []


def test_the_whole_checkpoints_load_as_transformers_loads_them(whole: Path, models: dict[str, nn.Module]) -> None:
    for kind, model in models.items():
        wanted = digest(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        load_into(model, whole / kind, progress=False)
        assert digest(model) == wanted


# ------------------------------------------------------------------ what is not structural

BIAS = "model.layers.1.self_attn.q_proj.bias"


def with_bias(folder: Path) -> None:
    file = wrecks.file_of(folder, wrecks.Q_PROJ)
    wrecks.change_tensors(folder, file, lambda t: {**t, BIAS: torch.zeros(16, dtype=torch.bfloat16)})


def test_an_unexpected_tensor_follows_the_policy(
    models: dict[str, nn.Module], spoilt: Callable[[str, Callable[[Path], object]], Path]
) -> None:
    folder = spoilt("llama", with_bias)
    report = load_into(models["llama"], folder, progress=False)
    assert report.unexpected == [BIAS]
    assert len(report.warnings) == 1
    assert BIAS in report.warnings[0]
    quiet = load_into(models["llama"], folder, on_unexpected="ignore", progress=False)
    assert (quiet.unexpected, quiet.warnings) == ([BIAS], [])
    with pytest.raises(PlanError, match="1 tensor of the source is not wanted by the model") as caught:
        load_into(models["llama"], folder, on_unexpected={"q_proj": "error"}, progress=False)
    assert caught.value.tensor == BIAS


def test_doubles_are_narrowed_and_that_is_reported(
    models: dict[str, nn.Module], spoilt: Callable[[str, Callable[[Path], object]], Path]
) -> None:
    def doubled(folder: Path) -> None:
        file = wrecks.file_of(folder, wrecks.O_PROJ)
        wrecks.change_tensors(folder, file, lambda t: {**t, wrecks.O_PROJ: t[wrecks.O_PROJ].double()})

    report = load_into(models["llama"], spoilt("llama", doubled), progress=False)
    assert report.cast == {wrecks.O_PROJ: ("torch.float64", "torch.bfloat16")}
    assert f"1 from torch.float64 to torch.bfloat16: {wrecks.O_PROJ}" in str(report)


@pytest.mark.parametrize(
    ("kind", "name", "target"), [("llama", wrecks.O_PROJ, wrecks.O_PROJ), ("mixtral", wrecks.EXPERT, GATE_UP)]
)
def test_nan_is_found_where_one_looks_for_it(
    kind: str,
    name: str,
    target: str,
    models: dict[str, nn.Module],
    spoilt: Callable[[str, Callable[[Path], object]], Path],
) -> None:
    def poisoned(folder: Path) -> None:
        file = wrecks.file_of(folder, name)
        tensors = load_file(file)
        tensors[name][0, 0] = torch.nan
        wrecks.change_tensors(folder, file, lambda _: tensors)

    folder = spoilt(kind, poisoned)
    with pytest.raises(LoadError, match="NaN") as caught:
        load_into(models[kind], folder, verify="finite", progress=False)
    assert target in str(caught.value)
    load_into(models[kind], folder, progress=False)


# ------------------------------------------------------------------ the same from a stream

STREAMED = [
    pytest.param(kind, name, id=f"{kind}: {name}")
    for kind, names in {
        "llama": (
            "an o_proj is missing", "a k_proj is missing", "all linear layers of a layer are missing",
            "embed_tokens is missing", "all names have another prefix", "a q_proj is twice as large",
            "a k_proj is of another shape", "the vocabulary is smaller", "an o_proj holds integers",
        ),
        "mixtral": tuple(MIXTRAL),
    }.items()
    for name in names
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), STREAMED)
def test_a_stream_of_the_same_tensors_does_not_load_either(
    kind: str, name: str, models: dict[str, Any], spoilt: Callable[[str, Callable[[Path], object]], Path]
) -> None:
    folder = spoilt(kind, {"llama": wrecks.LLAMA, "mixtral": wrecks.MIXTRAL}[kind][name])
    pairs = (pair for file in wrecks.shards(folder) for pair in load_file(file).items())
    model = type(models[kind])(models[kind].config).to(torch.bfloat16)
    with pytest.raises((LoadError, CoverageError, PlanError)):
        load_into(model, pairs, progress=False)
