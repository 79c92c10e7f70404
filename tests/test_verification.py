"""What a load checks when it is asked to: files before it, values while they pass, and what it says for the record."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.hub_server import servers
from weightloaders import (
    LLM,
    ChecksumList,
    Convert,
    Weights,
    from_pretrained,
    load_into,
    load_model,
    load_status,
    open_weights,
    plan_load,
)
from weightloaders.cli.main import app
from weightloaders.errors import CheckpointFormatError, ConfigError, LoadError, SourceReadError
from weightloaders.transfer.inspecting import values_of
from weightloaders.transfer.verify import Verification

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "model.safetensors"
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1, eos_token_id=1, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 16)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    listed(folder, folder / "SHA256SUMS")
    return folder


def listed(folder: Path, path: Path) -> Path:
    names = sorted(file.name for file in folder.iterdir())
    path.write_text("".join(f"{sha256((folder / name).read_bytes())}  {name}\n" for name in names))
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def spoil(file: Path) -> None:
    """Change one byte that leaves the file readable as what it is."""
    content = file.read_bytes()
    file.write_bytes(content + b"\n" if file.suffix == ".json" else content[:-1] + bytes([content[-1] ^ 1]))


def empty_model(folder: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config.from_pretrained(folder))


def by_config(folder: Path, verify: Any) -> Any:
    file = folder.parent / "llm.json"
    file.write_text(json.dumps({"model": "./model", "verify": verify, "progress": False}))
    return LLM.from_config(file)


def on_command_line(folder: Path, verify: Any) -> Any:
    arguments = ["generate", str(folder), "w2", "--quiet", "--max-tokens", "1", "--verify", verify]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    if result.exit_code:
        raise SourceReadError(result.stderr)


def planned(folder: Path, verify: Any, model: nn.Module) -> Any:
    with open_weights(folder) as weights:
        return plan_load(model, weights, verify=verify).run(model)


ENTRANCES = {
    "plan_load": lambda folder, verify, model: planned(folder, verify, model),
    "load_into": lambda folder, verify, model: load_into(model, folder, verify=verify, **QUIET),
    "load_model": lambda folder, verify, model: load_model(model, folder, verify=verify, **QUIET),
    "from_pretrained": lambda folder, verify, model: from_pretrained(folder, verify=verify, **QUIET),
    "LLM": lambda folder, verify, model: LLM(folder, verify=verify, **QUIET),
    "reload_weights": lambda folder, verify, model: LLM(model=folder, **QUIET).reload_weights(verify=verify),
    "config file": lambda folder, verify, model: by_config(folder, verify),
    "command line": lambda folder, verify, model: on_command_line(folder, verify),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_files_are_held_against_their_checksums_through_every_entrance(folder: Path, entrance: str) -> None:
    model = empty_model(folder)
    ENTRANCES[entrance](folder, "sha256", model)
    model = empty_model(folder)
    before = values_of(model.lm_head.weight)
    spoil(folder / WEIGHTS)
    with pytest.raises(SourceReadError, match=rf"verify='sha256': .*{WEIGHTS} has the checksum \(sha256\)"):
        ENTRANCES[entrance](folder, "sha256", model)
    assert values_of(model.lm_head.weight) == before
    assert load_status(model) is None


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("entrance", ["from_pretrained", "LLM", "config file", "command line"])
def test_a_config_or_tokenizer_that_is_not_what_it_must_be_is_refused_before_it_is_used(
    folder: Path, file: str, entrance: str
) -> None:
    spoil(folder / file)
    if entrance == "from_pretrained" and file.startswith("tokenizer"):
        # It is not used.
        ENTRANCES[entrance](folder, "sha256", None)
        return
    with pytest.raises(SourceReadError, match=rf"{file} has the checksum"):
        ENTRANCES[entrance](folder, "sha256", None)


def test_code_that_comes_with_a_model_does_not_run_unless_it_is_what_it_must_be(folder: Path) -> None:
    ran = folder.parent / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig"}
    config["model_type"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("")
    listed(folder, folder.parent / "sums").rename(folder / "SHA256SUMS")
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import GPT2Config as OwnConfig\n")
    with pytest.raises(SourceReadError, match=r"own\.py has the checksum"):
        from_pretrained(folder, verify="sha256", trust_remote_code=True, **QUIET)
    assert not ran.exists()


def test_a_link_to_nowhere_beside_the_config_is_no_concern_of_who_does_not_read_it(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("nowhere")
    for verify in (None, "sha256"):
        from_pretrained(folder, verify=verify, **QUIET)


def test_what_nobody_has_a_checksum_of_beside_the_weights_is_told(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{sha256((folder / WEIGHTS).read_bytes())}  {WEIGHTS}\n")
    report = from_pretrained(folder, verify="sha256", **QUIET)[1]
    assert f"checksums compared and right: 1 file, by {folder / 'SHA256SUMS'}" in report.notes
    [unknown] = [note for note in report.notes if note.startswith("no checksum is known of")]
    assert "config.json" in unknown
    assert "generation_config.json" in unknown
    assert report.files == {str(folder / WEIGHTS): f"sha256:{sha256((folder / WEIGHTS).read_bytes())}"}


def test_a_list_that_is_named_is_asked_alone(folder: Path, tmp_path: Path) -> None:
    trusted = listed(folder, tmp_path / "trusted")
    spoil(folder / WEIGHTS)
    # Whoever changes a file changes a list beside it as well.
    (folder / "SHA256SUMS").unlink()
    listed(folder, folder.parent / "sums").rename(folder / "SHA256SUMS")
    load_into(empty_model(folder), folder, verify="sha256", **QUIET)
    for verify in ({"sha256": trusted}, {"sha256": str(trusted)}, ChecksumList(trusted, folder), [{"sha256": trusted}]):
        with pytest.raises(SourceReadError, match=rf"{WEIGHTS} has the checksum .* which {trusted} says"):
            load_into(empty_model(folder), folder, verify=verify, **QUIET)
    trusted.write_text(f"{'a' * 64}  other\n")
    with pytest.raises(SourceReadError, match=f"no checksum is known for .*{WEIGHTS}, which {trusted} should list"):
        load_into(empty_model(folder), folder, verify={"sha256": trusted}, **QUIET)
    trusted.write_text("a" * 40)
    with pytest.raises(CheckpointFormatError, match=f"{trusted}: line 1 is no entry"):
        load_into(empty_model(folder), folder, verify={"sha256": trusted}, **QUIET)


@pytest.mark.parametrize("entrance", ["config file", "command line"])
def test_a_list_is_named_in_a_config_file_and_on_the_command_line(folder: Path, tmp_path: Path, entrance: str) -> None:
    trusted = listed(folder, tmp_path / "trusted")
    said: Any = {"sha256": "./trusted"} if entrance == "config file" else f"sha256={trusted}"
    ENTRANCES[entrance](folder, said, None)
    spoil(folder / WEIGHTS)
    with pytest.raises(SourceReadError, match=r"has the checksum .* which .*trusted says"):
        ENTRANCES[entrance](folder, [said, "finite"] if entrance == "config file" else said, None)


@pytest.mark.parametrize(
    "verify", ["md5", 3, ["finite", "x"], {"sha256": 3}, {"md5": "x"}, {"sha256": "x", "y": "z"}, {}]
)
def test_a_check_that_there_is_not_is_refused_before_anything_is_opened(verify: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"verify={verify!r}: None, 'finite', 'sha256', 'record'")):
        load_into(nn.Linear(1, 1), "nowhere", verify=verify)
    assert Verification.of(["finite", "sha256"]) == Verification(finite=True, sha256=True)
    assert Verification.of(None) == Verification.of(()) == Verification()


# ------------------------------------------------------------------ values


class Mixed(nn.Module):
    """One parameter for each way that bytes take."""

    def __init__(self) -> None:
        super().__init__()
        self.straight = nn.Parameter(torch.zeros(300, 70))
        self.cast = nn.Parameter(torch.zeros(64, 33, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(40, 50).t())
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.squared = nn.Parameter(torch.zeros(5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


RULES = [
    Convert(["a", "b"], "fused", lambda a, b: torch.cat([a, b])),
    Convert("root", "squared", lambda root: root.square()),
]


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "straight": torch.randn(300, 70), "cast": torch.randn(64, 33), "turned": torch.randn(50, 40),
        "a": torch.randn(2, 4), "b": torch.randn(4, 4), "root": torch.randn(5), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0), "count": torch.tensor([5, 6]),
    }  # fmt: skip


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "straight": tensors["straight"], "cast": tensors["cast"].bfloat16(), "turned": tensors["turned"],
        "fused": torch.cat([tensors["a"], tensors["b"]]), "squared": tensors["root"].square(),
        "empty": tensors["empty"], "scalar": tensors["scalar"], "count": tensors["count"],
    }  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


TRANSFERS: list[Any] = ["direct", {"threads": 1}, {"threads": 7}, "mmap", "o_direct", "stream"]


@pytest.mark.parametrize("transfer", TRANSFERS, ids=str)
def test_a_record_has_the_checksum_of_each_parameter_as_it_was_loaded(tmp_path: Path, transfer: Any) -> None:
    tensors, file = stored(), tmp_path / "m.safetensors"
    save_file(tensors, file)
    report = load_into(Mixed(), file, rules=RULES, verify="record", transfer=transfer, **QUIET)
    assert {name: found.sha256 for name, found in report.provenance.items()} == {
        name: sha256(bytes_of(tensor)) for name, tensor in expected(tensors).items()
    }
    for name, tensor in expected(tensors).items():
        assert (report.provenance[name].dtype, report.provenance[name].shape) == (
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        )  # fmt: skip
    # What lies in the file as it does in the model can be checked with no more than dd and sha256sum.
    [part] = report.provenance["straight"].parts
    [(offset, length)] = part.extents
    assert (part.tensor, part.file) == ("straight", str(file))
    assert sha256(file.read_bytes()[offset : offset + length]) == report.provenance["straight"].sha256
    assert [part.tensor for part in report.provenance["fused"].parts] == ["a", "b"]
    assert load_into(Mixed(), file, rules=RULES, **QUIET).provenance == {}


@pytest.mark.parametrize("kind", ["dict", "stream", "own load_weights"])
def test_a_record_is_kept_whatever_the_way_of_loading(tmp_path: Path, kind: str) -> None:
    class Own(nn.Linear):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    tensors = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    model = Own(4, 3) if kind == "own load_weights" else nn.Linear(4, 3)
    source: Any = iter(tensors.items()) if kind == "stream" else tensors
    report = load_into(model, source, verify="record", **QUIET)
    assert {name: found.sha256 for name, found in report.provenance.items()} == {
        name: sha256(bytes_of(tensor)) for name, tensor in tensors.items()
    }
    assert report.provenance["weight"].shape == (3, 4)
    named = [part.tensor for found in report.provenance.values() for part in found.parts]
    assert sorted(named) == ([] if kind == "own load_weights" else ["bias", "weight"])


def test_code_of_others_has_the_last_word_in_the_record() -> None:
    class Wrapping(nn.Linear):
        def load_weights(self, weights: Any) -> None:
            load_into(self, weights, **QUIET)
            self.weight.data.mul_(2)

    tensors = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    report = load_into(Wrapping(4, 3), tensors, verify="record", **QUIET)
    assert report.provenance["weight"].sha256 == sha256(bytes_of(tensors["weight"] * 2))


def test_a_parameters_own_loader_may_write_once_more_to_what_was_filled() -> None:
    model = nn.Linear(4, 3)

    def own(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)
        model.weight.data.fill_(7)

    model.bias.weight_loader = own  # type: ignore[attr-defined]
    tensors = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    report = load_into(model, tensors, verify="record", **QUIET)
    assert report.provenance["weight"].sha256 == sha256(bytes_of(torch.full((3, 4), 7.0)))


def test_a_manifest_is_the_same_wherever_and_however_the_same_is_loaded(tmp_path: Path) -> None:
    manifests = set()
    for name in ("here", "there/and/further"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_file(stored(), folder / "m.safetensors")
        listed(folder, tmp_path / "sums").rename(folder / "SHA256SUMS")
        for transfer in TRANSFERS:
            checks = ["sha256", "record"]
            report = load_into(Mixed(), folder, rules=RULES, verify=checks, transfer=transfer, **QUIET)
            manifests.add(report.manifest())
    [text] = manifests
    document = json.loads(text)
    assert (document["format"], document["version"]) == ("weightloaders-manifest", 1)
    assert document["files"] == {"m.safetensors": f"sha256:{sha256((folder / 'm.safetensors').read_bytes())}"}
    found = document["parameters"]["straight"]
    assert found["dtype"] == "float32"
    assert found["shape"] == [300, 70]
    assert found["from"][0]["file"] == "m.safetensors"
    assert json.loads(report.to_json())["provenance"]["straight"]["sha256"] == found["sha256"]
    with pytest.raises(ConfigError, match="recorded nothing"):
        load_into(Mixed(), folder, rules=RULES, **QUIET).manifest()


@pytest.mark.parametrize("transfer", TRANSFERS, ids=str)
def test_what_is_not_finite_is_told_by_tensor_number_and_place(tmp_path: Path, transfer: Any) -> None:
    tensors = stored()
    tensors["straight"][250, 3] = float("nan")
    tensors["straight"][250, 69] = float("inf")
    tensors["straight"][299, 0] = float("-inf")
    tensors["turned"][49, 2] = float("nan")
    # Too large for what it is cast to, but not for that from which it comes.
    tensors["cast"][1, 32] = 3.4e38
    save_file(tensors, tmp_path / "m.safetensors")
    model = Mixed()
    with pytest.raises(LoadError) as caught:
        load_into(model, tmp_path, rules=RULES, verify="finite", transfer=transfer, **QUIET)
    for said in (
        "3 parameters hold NaN or infinity",
        "straight (1 NaN and 2 infinite, the first at [250, 3])",
        "turned (1 NaN, the first at [49, 2])",
        "cast (1 infinite, the first at [1, 32])",
    ):
        assert said in caught.value.message
    assert load_status(model) == "failed"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
)
def test_values_are_counted_in_every_dtype_and_layout(dtype: torch.dtype) -> None:
    values = torch.ones(1000, 700)
    values[3, 5], values[999, 699] = float("nan"), float("nan")
    tensor = values.to(dtype)
    for one in (tensor, tensor.t().contiguous().t(), torch.stack([tensor, tensor], -1)[..., 0]):
        found = values_of(one)
        assert found.sha256 == sha256(bytes_of(tensor))
        assert found.not_finite is not None
        assert (found.not_finite.nans, found.not_finite.infinities, found.not_finite.first) == (2, 0, (3, 5))
    # A sum may overflow where no element does.
    top = torch.finfo(dtype).max if not dtype.is_complex else torch.finfo(torch.float32).max
    assert values_of(torch.full((5000,), top, dtype=torch.float64).to(dtype)).not_finite is None
    assert values_of(torch.zeros(0, 3).to(dtype)).not_finite is None


def test_hashing_a_tensor_takes_bounded_memory() -> None:
    program = """
import resource, sys, torch
from weightloaders.transfer.inspecting import values_of
tensor = torch.zeros(16 << 20).view(1 << 12, -1).t()
values_of(tensor)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
values_of(torch.zeros(96 << 20, dtype=torch.uint8).view(-1, 3).t())
values_of(tensor)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert grown < 140 << 10  # kB: the tensor of 96 MiB itself, and little more


def test_tensors_that_lie_raw_are_read_once_for_record_and_load(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "m.safetensors")
    plain = load_into(Mixed(), tmp_path, rules=RULES, **QUIET)
    recorded = load_into(Mixed(), tmp_path, rules=RULES, verify=["record", "finite"], **QUIET)
    assert recorded.bytes_read == plain.bytes_read
    assert recorded.reads == plain.reads
    assert isinstance(open_weights(tmp_path), Weights)
    assert load_file(tmp_path / "m.safetensors").keys() == stored().keys()


def test_in_the_hubs_cache_the_names_of_blobs_tell_of_a_config_too(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in folder.iterdir():
        content = file.read_bytes()
        is_large = file.name == WEIGHTS
        name = sha256(content) if is_large else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (repository / "blobs" / name).write_bytes(content)
        if file.name != "SHA256SUMS":
            (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    report = LLM(snapshot, verify=["sha256", "record"], **QUIET).load_report
    assert report is not None
    assert not [note for note in report.notes if "no checksum is known" in note]
    assert {name.rpartition("/")[2]: said.partition(":")[0] for name, said in report.files.items()} == {
        WEIGHTS: "sha256", "config.json": "git", "generation_config.json": "git", "tokenizer.json": "git",
        "tokenizer_config.json": "git",
    }  # fmt: skip
    spoil((snapshot / "config.json").resolve())
    config = (snapshot / "config.json").resolve()
    config.write_bytes(config.read_bytes() + b"\n")
    with pytest.raises(SourceReadError, match=r"config\.json has the checksum \(git's\)"):
        from_pretrained(snapshot, verify="sha256", **QUIET)


def test_of_what_lies_on_a_server_is_said_that_no_checksum_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    content = save({"weight": torch.ones(2, 2)})
    model = torch.nn.Linear(2, 2, bias=False)
    with servers() as start:
        web = start()
        web.files |= {"/model.safetensors": content, "/SHA256SUMS": b"0" * 64 + b"  model.safetensors\n"}
        before = model.weight.detach().clone()
        with pytest.raises(SourceReadError, match="lies on no disk of this machine") as caught:
            load_into(model, f"{web.url}/model.safetensors", verify="sha256", progress=False)
        assert "download it" in (caught.value.hint or "")
        assert torch.equal(model.weight, before)
        load_into(model, f"{web.url}/model.safetensors", verify="record", progress=False)
    assert model.weight.eq(1).all()
