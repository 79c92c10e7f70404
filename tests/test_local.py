"""The loader `local`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from weightloaders.errors import CheckpointFormatError, IncompleteCheckpointError, SourceNotFoundError
from weightloaders.loaders.local import LocalLoader

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    with LocalLoader().get_weights(str(tmp_path)) as weights:
        assert torch.equal(weights["w"], torch.arange(6.0).view(2, 3))


def test_a_single_file_whatever_it_is_called(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "weights")
    with LocalLoader().get_weights(str(tmp_path / "weights")) as weights:
        assert list(weights) == ["w"]


def test_a_path_object_and_a_home_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for source in (tmp_path, "~", "~/model.safetensors"):
        with LocalLoader().get_weights(source) as weights:  # type: ignore[arg-type]
            assert list(weights) == ["w"]


def test_the_pattern_picks_another_set(tmp_path: Path) -> None:
    save_file({"hf": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"original": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    with LocalLoader().get_weights(str(tmp_path)) as weights:
        assert list(weights) == ["hf"]
        assert set(weights.skipped_files) == {"consolidated.safetensors"}
    with LocalLoader(file_pattern="consolidated*").get_weights(str(tmp_path)) as weights:
        assert list(weights) == ["original"]


def test_its_options_reach_the_choice_of_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))

    def names(**options: bool) -> set[str]:
        with LocalLoader(**options).get_weights(str(tmp_path)) as weights:  # type: ignore[arg-type]
            return set(weights)

    assert names() == {"a"}
    assert names(include_unindexed=True) == {"a", "b"}
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError):
        names()
    assert names(ignore_index=True) == {"b"}


def test_the_limit_of_headers_is_the_callers(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match="max_header_bytes"):
        LocalLoader(max_header_bytes=8).get_weights(str(tmp_path))


def test_a_torch_file_picked_by_pattern_is_called_what_it_is(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceNotFoundError, match="'torch' and 'hf'"):
        LocalLoader().get_weights(str(tmp_path))
    with pytest.raises(CheckpointFormatError, match="PyTorch"):
        LocalLoader(file_pattern="*.bin").get_weights(str(tmp_path))


@pytest.mark.parametrize("source", ["org/name", "hf://org/name", "nowhere", "a\0b", ""])
def test_what_is_not_on_disk_is_not_looked_for_elsewhere(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceNotFoundError):
        LocalLoader().get_weights(source)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda p: save_file({}, p / "model.safetensors"), "yes"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "yes"),
        (lambda p: (p / "pytorch_model.bin").write_bytes(b""), "no"),
        (lambda p: (p / "old.safetensors").mkdir(), "no"),
        (lambda p: None, "no"),
    ],
)
def test_the_probe_of_a_folder_goes_by_names(tmp_path: Path, make: object, answer: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    probe = LocalLoader.probe(str(tmp_path))
    assert (probe.answer, bool(probe.reason)) == (answer, True)


def test_the_probe_of_a_file_goes_by_its_name_then_its_first_bytes(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "renamed").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    torch.save({"w": torch.ones(1)}, tmp_path / "x.bin")
    answers = {path.name: LocalLoader.probe(str(path)).answer for path in tmp_path.iterdir()}
    # What is named safetensors and is none is still ours to complain about.
    assert answers == {"model.safetensors": "yes", "renamed": "yes", "pointer.safetensors": "yes", "x.bin": "no"}
    assert LocalLoader.probe(str(tmp_path / "nowhere")).answer == "no"
    assert LocalLoader.probe("a\0b").answer == "no"


def test_importing_the_loaders_imports_no_torch() -> None:
    code = (
        "import sys, weightloaders.loaders.local, weightloaders.loaders.hf\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
