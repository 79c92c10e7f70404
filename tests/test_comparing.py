"""`compare`: two models, sources or records of loads, each against each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import compare, load_into, open_weights
from weightloaders.comparing import Comparison, Difference
from weightloaders.errors import CheckpointFormatError, ConfigError, LoaderContractError

if TYPE_CHECKING:
    from pathlib import Path


def model(**changes: torch.Tensor) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number)
        for name, value in changes.items():
            made.get_parameter(name.replace("_", ".", 1)).copy_(value)
    return made


def every_side(made: nn.Module, folder: Path) -> dict[str, Any]:
    """The same tensors as everything that they may be given as."""
    folder.mkdir()
    file = folder / "m.safetensors"
    save_file(made.state_dict(), file)
    report = load_into(model(), file, verify="record", progress=False)
    (folder / "manifest.json").write_text(report.manifest())
    return {
        "model": made, "file": file, "name": str(folder), "weights": open_weights(file), "dict": made.state_dict(),
        "report": report, "manifest": folder / "manifest.json",
    }  # fmt: skip


KINDS = ["model", "file", "name", "weights", "dict", "report", "manifest"]


@pytest.mark.parametrize("a", KINDS)
@pytest.mark.parametrize("b", KINDS)
def test_each_kind_is_held_against_each(tmp_path: Path, a: str, b: str) -> None:
    one = every_side(model(), tmp_path / "one")
    other = every_side(model(**{"1_bias": torch.tensor([3.0, 6.5])}), tmp_path / "other")
    assert compare(one[a], one[b]) == Comparison(4)
    found = compare(one[a], other[b])
    is_recorded = {a, b} & {"report", "manifest"}
    assert found.differences == [
        Difference("1.bias", "values", "float32 [2]", "float32 [2]", None if is_recorded else 2.5)
    ]
    assert not found.equal
    assert found.same == 3
    assert compare(one[a], other[b], values=False).equal


def test_shapes_dtypes_and_names_differ_in_records_as_in_sources(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, file)
    report = load_into(nn.Linear(3, 2), file, verify="record", progress=False)
    other = {"weight": torch.ones(3, 2), "bias": torch.ones(2).half(), "more": torch.ones(1)}
    assert {d.name: d.kind for d in compare(report, other).differences} == {
        "weight": "shape", "bias": "dtype", "more": "only in B"
    }  # fmt: skip
    assert {d.name: d.kind for d in compare(other, report).differences}["more"] == "only in A"
    assert str(compare(other, report)).splitlines()[1] == "1 differ in shape; 1 differ in dtype; 1 only in A"


def test_tied_names_are_in_a_record_as_well(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    made = Tied()
    report = load_into(made, {"a.weight": torch.ones(2, 2)}, verify="record", progress=False)
    assert compare(made, report).equal


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("format"),
        lambda d: d.update(version=2),
        lambda d: d.update(parameters=[]),
        lambda d: d["parameters"]["weight"].pop("sha256"),
        lambda d: d["parameters"]["weight"].update(shape=3),
        lambda d: d.pop("tied"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, change: Any) -> None:
    report = load_into(nn.Linear(3, 2), nn.Linear(3, 2).state_dict(), verify="record", progress=False)
    document = json.loads(report.manifest())
    change(document)
    (tmp_path / "m.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointFormatError, match=r"m\.json is no manifest"):
        compare(tmp_path / "m.json", {})
    (tmp_path / "m.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointFormatError, match=r"m\.json is no manifest"):
        compare(tmp_path / "m.json", {})


def test_what_has_no_checksums_or_no_tensors_is_refused() -> None:
    report = load_into(nn.Linear(3, 2), nn.Linear(3, 2).state_dict(), progress=False)
    with pytest.raises(ConfigError, match="recorded nothing"):
        compare(report, {})
    with pytest.raises(LoaderContractError):
        compare(3, {})
