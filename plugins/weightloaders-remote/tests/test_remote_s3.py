"""Checkpoints in a bucket of a real S3 server."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from weightloaders_remote import RemoteLoader

from weightloaders import LLM, WeightLoaderRegistry, from_pretrained, load_into, open_weights, plan_load, save_weights
from weightloaders.cli.main import app
from weightloaders.errors import (
    IncompleteCheckpointError,
    ModelError,
    OptionsError,
    RemoteReadError,
    SourceNotFoundError,
    SourceReadError,
)
from weightloaders.testing import only_plugins

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import S3

INDEX = "model.safetensors.index.json"
TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.c": torch.tensor([1, -2], dtype=torch.int64),
    "s": torch.tensor(2.5),
}


@pytest.fixture
def place(s3: S3, request: pytest.FixtureRequest) -> str:
    """A key of this test's own, without a scheme."""
    return f"bucket/{request.node.name}"


def same(weights: Any, tensors: dict[str, torch.Tensor] = TENSORS) -> bool:
    with weights:
        return weights.keys() == tensors.keys() and all(torch.equal(weights[n], t) for n, t in tensors.items())


# ------------------------------------------------------------------ a real model


@pytest.fixture(scope="module")
def minilm_in_s3(s3_server: S3, minilm_folder: Path) -> str:
    return s3_server.upload(minilm_folder, "bucket/models/minilm")


def test_a_real_model_loaded_from_a_bucket_equals_the_one_loaded_from_disk(
    s3: S3, minilm_in_s3: str, minilm_folder: Path
) -> None:
    model, report = from_pretrained(minilm_in_s3, progress=False)
    expected = AutoModel.from_pretrained(minilm_folder)
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert report.loader == "remote"
    assert report.bytes_read == report.bytes_by_path["straight"]
    # Neighbours are asked for together, though their places in memory are apart.
    assert report.reads < len(theirs) / 3
    assert all(f" in {minilm_in_s3}/model.safetensors, bytes " in source for source in report.sources.values())


def test_the_facade_finds_config_tokenizer_and_weights_in_the_bucket(s3: S3, minilm_in_s3: str) -> None:
    llm = LLM(minilm_in_s3, progress=False)
    assert llm.tokenizer("hello")["input_ids"][0] == llm.tokenizer.cls_token_id
    assert llm.load_report is not None
    assert llm.reload_weights().bytes_read == llm.load_report.bytes_read


def test_a_plan_from_the_bucket_is_that_from_the_disk(s3: S3, minilm_in_s3: str, minilm_folder: Path) -> None:
    model = AutoModel.from_pretrained(minilm_folder)
    remote, local = plan_load(model, minilm_in_s3), plan_load(model, minilm_folder)
    assert remote.ok
    assert remote.bytes_to_read == local.bytes_to_read
    assert "s3://bucket/models/minilm/model.safetensors" in remote.explain("embeddings.word_embeddings.weight")


def test_the_command_line_takes_addresses_and_options(s3: S3, minilm_in_s3: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    where = ["--option", f"endpoint={s3.endpoint}"]
    planned = CliRunner().invoke(app, ["plan", minilm_in_s3, *where])
    assert planned.stdout.startswith("it fits\n103 parameters from"), planned.output
    shown = CliRunner().invoke(app, ["inspect", f"{minilm_in_s3}/model.safetensors", "--summary", *where])
    assert "104 tensors" in shown.stdout
    assert "AKIAIOSFODNN7EXAMPLE" not in planned.output + shown.output


def test_a_model_without_a_tokenizer_takes_token_ids(s3: S3, place: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    llm = LLM(s3.upload(tmp_path, place), progress=False)
    assert llm.tokenizer is None


@pytest.mark.slow
def test_a_model_in_one_gguf_file_needs_nothing_else(s3: S3, tmp_path: Path) -> None:
    gguf = pytest.importorskip("weightloaders_gguf", reason="the package that reads GGUF is not installed")
    file = pytest.importorskip("demo.prepare").smollm2_gguf()
    WeightLoaderRegistry.register("gguf", gguf.GgufLoader, replace=True)
    s3.put("bucket/gguf/SmolLM2.gguf", file.read_bytes())
    remote, report = from_pretrained("s3://bucket/gguf/SmolLM2.gguf", progress=False)
    local, _ = from_pretrained(file, progress=False)
    assert report.loader == "remote"
    theirs = dict(local.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in remote.named_parameters())
    # A folder with one such file is as good.
    assert set(open_weights("s3://bucket/gguf")) == set(open_weights("s3://bucket/gguf/SmolLM2.gguf"))


# ------------------------------------------------------------------ which files


def test_shards_are_chosen_by_the_index_and_the_rest_is_left_alone(s3: S3, place: str) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b.c": "deep/er/two.safetensors"}}
    s3.put(f"{place}/{INDEX}", json.dumps(index).encode())
    s3.put(f"{place}/model-00001-of-00002.safetensors", save({"a": TENSORS["a"]}))
    s3.put(f"{place}/deep/er/two.safetensors", save({"b.c": TENSORS["b.c"]}))
    s3.put(f"{place}/pytorch_model.bin", b"never opened")
    s3.put(f"{place}/optimizer.pt", b"never opened")
    with open_weights(f"s3://{place}") as weights:
        assert same(weights, {name: TENSORS[name] for name in ("a", "b.c")})
        assert weights.skipped_files["optimizer.pt"] == "it is the state of an optimizer or trainer"
    # The index itself may be named.
    assert set(open_weights(f"s3://{place}/{INDEX}")) == {"a", "b.c"}


@pytest.mark.parametrize("file", ["two.safetensors", "deep/two.safetensors"])
def test_a_shard_that_the_index_names_and_the_bucket_lacks_is_named(s3: S3, place: str, file: str) -> None:
    s3.put(f"{place}/{INDEX}", json.dumps({"weight_map": {"a": "one.safetensors", "b": file}}).encode())
    s3.put(f"{place}/one.safetensors", save({"a": TENSORS["a"]}))
    with pytest.raises(IncompleteCheckpointError, match=f"names 2 files, but {file} is not there"):
        open_weights(f"s3://{place}")


def test_one_file_is_read_by_its_own_address(s3: S3, place: str) -> None:
    s3.put(f"{place}/a b#ü%20+.safetensors", save(TENSORS))
    s3.put(f"{place}/model.safetensors", save({"other": torch.ones(1)}))
    assert same(open_weights(f"s3://{place}/a b#ü%20+.safetensors"))


def test_torch_files_are_read_from_a_bucket(s3: S3, place: str, tmp_path: Path) -> None:
    torch.save({"state_dict": TENSORS}, tmp_path / "pytorch_model.bin")
    torch.save(TENSORS, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    address = s3.upload(tmp_path, place)
    assert same(open_weights(address))
    assert same(open_weights(f"{address}/legacy.pt"))
    # Options of whoever reads the files go to him.
    with pytest.raises(OptionsError, match="unknown"):
        open_weights(address, nonsense=1)
    assert same(open_weights(address, key="state_dict"))


def test_raw_values_are_read_from_a_bucket(s3: S3, place: str) -> None:
    s3.put(f"{place}/meta.txt", b"a:2,3\nb.c:2:int64\ns:\n")
    s3.put(f"{place}/model.bin", b"".join(tensor.numpy().tobytes() for tensor in TENSORS.values()))
    assert same(open_weights(f"s3://{place}"))
    assert same(open_weights(f"s3://{place}/model.bin"))
    assert same(open_weights(f"s3://{place}", reader="binary", reader_options={"stored_dtype": "float32"}))


def test_archives_of_numpys_are_read_from_a_bucket(s3: S3, place: str, tmp_path: Path) -> None:
    npz = pytest.importorskip("weightloaders_npz", reason="the package that reads .npz is not installed")
    WeightLoaderRegistry.register("npz", npz.NpzLoader, replace=True)
    arrays = {name: tensor.numpy() for name, tensor in TENSORS.items()}
    np.savez(tmp_path / "model.npz", **arrays)
    np.savez_compressed(tmp_path / "packed.npz", **arrays)
    address = s3.upload(tmp_path, place)
    for name in ("model", "packed"):
        assert same(open_weights(f"{address}/{name}.npz"))
    # In a folder, one of several must be named.
    with pytest.raises(SourceNotFoundError, match=r"several archives: model\.npz, packed\.npz"):
        open_weights(address)
    assert same(open_weights(address, reader="npz", file_pattern="p*.npz"))


def in_metas_layout(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Under Meta's names, the rows of queries and keys as Meta has them."""
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        theirs = functools.reduce(lambda text, pair: text.replace(*pair), names.items(), name)
        rotary = "wq" in theirs or "wk" in theirs
        state[theirs] = tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(tensor.shape) if rotary else tensor
    return state


def test_a_llama_in_metas_layout_is_loaded_from_a_bucket(s3: S3, place: str, tmp_path: Path) -> None:
    pytest.importorskip("weightloaders_meta", reason="the package that knows Meta's layout is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1}
    expected = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5))
    axes = {"wo": 1, "w2": 1, "norm": None, "attention_norm": None, "ffn_norm": None}
    for part in range(2):
        found = {
            name: tensor if (axis := axes.get(name.split(".")[-2], 0)) is None else tensor.chunk(2, axis)[part].clone()
            for name, tensor in in_metas_layout(expected).items()
        }
        torch.save(found, tmp_path / f"consolidated.0{part}.pth")
    params = {
        "dim": 32,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": 1e-5,
        "multiple_of": 32,
        "vocab_size": 64,
    }
    (tmp_path / "params.json").write_text(json.dumps(params))
    address = s3.upload(tmp_path, place)
    with only_plugins("weightloaders-meta", "weightloaders-remote"):
        # Whoever does not name the reader is told of it.
        with pytest.raises(ModelError, match="reader='meta'"):
            from_pretrained(address)
        model, report = from_pretrained(address, loader="remote", loader_kwargs={"reader": "meta"}, progress=False)
        assert report.loader == "remote"
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
        llm = LLM(address, weight_loader="remote", weight_loader_kwargs={"reader": "meta"}, progress=False)
        assert llm.tokenizer is None
        with pytest.raises(SourceNotFoundError, match="is no folder"):
            open_weights(f"{address}/consolidated.00.pth", "remote", reader="meta")
        # Why there is no config is said, not that there is none.
        s3.remove_one(f"{place}/consolidated.01.pth")
        with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.0"):
            from_pretrained(address, loader="remote", loader_kwargs={"reader": "meta"})


def test_a_folder_in_the_folder_is_an_option(s3: S3, place: str) -> None:
    s3.put(f"{place}/sub/er/model.safetensors", save(TENSORS))
    assert same(open_weights(f"s3://{place}", subfolder="sub/er"))
    with pytest.raises(SourceNotFoundError, match=r"can't be '\.' or '\.\.'"):
        open_weights(f"s3://{place}/sub", subfolder="../other")
    with pytest.raises(SourceNotFoundError, match="there is no file in it") as caught:
        open_weights(f"s3://{place}/sub")
    assert caught.value.hint == "weights lie in the sub-folder er: give that one"


def test_the_bucket_itself_may_be_the_folder(s3: S3) -> None:
    s3.bucket("whole")
    s3.put("whole/model.safetensors", save(TENSORS))
    assert same(open_weights("s3://whole"))
    assert same(open_weights("s3://whole/"))


@pytest.mark.slow
def test_a_folder_with_more_objects_than_one_answer_lists(s3: S3, place: str) -> None:
    for number in range(1005):
        s3.put(f"{place}/{number}.txt", b"")
    s3.put(f"{place}/z.safetensors", save(TENSORS))
    assert same(open_weights(f"s3://{place}"))


# ------------------------------------------------------------------ what goes wrong


def test_what_is_not_there_is_told_apart(s3: S3, place: str) -> None:
    with pytest.raises(SourceNotFoundError, match=f"there is nothing below s3://{place}/"):
        open_weights(f"s3://{place}")
    with pytest.raises(SourceNotFoundError, match=r"there is nothing at s3://bucket/none\.safetensors"):
        open_weights("s3://bucket/none.safetensors")
    with pytest.raises(SourceNotFoundError, match="there is no s3://no-such-bucket"):
        open_weights("s3://no-such-bucket/model")
    with pytest.raises(SourceNotFoundError, match="there is no s3://no-such-bucket"):
        open_weights("s3://no-such-bucket/model.safetensors")
    s3.put(f"{place}/readme.txt", b"")
    with pytest.raises(SourceNotFoundError, match="no loader recognises what is in it"):
        open_weights(f"s3://{place}")


@pytest.mark.parametrize(
    "address", ["s3://", "s3:///model", "s3://key:s3cr3t@bucket/model", "s3://b*d/x", "gs://", "az://"]
)
def test_what_is_no_address_is_refused_without_repeating_it(s3: S3, address: str) -> None:
    with pytest.raises(SourceNotFoundError, match="address names no") as caught:
        open_weights(address)
    assert "s3cr3t" not in str(caught.value)


def test_an_object_that_is_exchanged_is_noticed(s3: S3, place: str) -> None:
    def of(value: float) -> bytes:
        return save({"big": torch.full((100_000,), value)})

    s3.put(f"{place}/model.safetensors", of(1.0))
    with open_weights(f"s3://{place}") as weights:
        assert weights["big"][0] == 1
        # Of the very same size.
        s3.put(f"{place}/model.safetensors", of(2.0))
        with pytest.raises(SourceReadError, match="was changed after it was catalogued"):
            weights["big"]
    assert same(open_weights(f"s3://{place}"), {"big": torch.full((100_000,), 2.0)})


def test_one_loader_that_is_used_twice_looks_again(s3: S3, place: str) -> None:
    loader = RemoteLoader()
    for value in (1.0, 2.0):
        tensors = {"a": torch.full((2,), value)}
        s3.put(f"{place}/model.safetensors", save(tensors))
        assert same(open_weights(f"s3://{place}", loader), tensors)


def test_without_credentials_it_says_where_they_are_looked_for(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteReadError, match="needs credentials") as caught:
        open_weights("s3://bucket/models")
    assert "anonymous=True" in str(caught.value.hint)


def test_a_public_bucket_takes_no_credentials(s3: S3, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.put(f"{place}/model.safetensors", save(TENSORS), ACL="public-read")
    assert same(open_weights(f"s3://{place}", anonymous=True))


def test_loading_saves_nothing_and_a_model_saved_from_a_bucket_is_as_before(s3: S3, place: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    s3.put(f"{place}/model.safetensors", save(model.state_dict()))
    again = torch.nn.Linear(3, 2)
    load_into(again, f"s3://{place}", progress=False)
    save_weights(again, tmp_path / "out", layout="checkpoint")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_auto_takes_it_for_every_scheme(s3: S3) -> None:
    for address in ("s3://bucket/x", "GS://bucket", "az://c/x.safetensors", "https://host/x"):
        assert WeightLoaderRegistry.resolve("auto", source=address)._created_as[0] == "remote"  # type: ignore[index]


@pytest.mark.parametrize(
    "key", ["m//model.safetensors", "/m/model.safetensors", "m/../model.safetensors", "m//", "./m"]
)
def test_an_address_with_an_empty_folder_or_dots_is_refused_and_reads_no_other_object(s3: S3, key: str) -> None:
    s3.put("bucket/m/model.safetensors", save(TENSORS))
    with pytest.raises(SourceNotFoundError, match="or empty"):
        open_weights(f"s3://bucket/{key}", RemoteLoader)


def test_a_key_that_can_not_be_read_is_named_and_the_file_beside_it_is_read_by_name(s3: S3, place: str) -> None:
    s3.put(f"{place}/model.safetensors", save(TENSORS))
    s3.put(f"{place}//stray", b"")
    with pytest.raises(RemoteReadError, match=r"leads to a key that can't be read, '.*//'") as caught:
        open_weights(f"s3://{place}", RemoteLoader)
    assert "name the weights file itself" in str(caught.value.hint)
    assert same(open_weights(f"s3://{place}/model.safetensors", RemoteLoader))
