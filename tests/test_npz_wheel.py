"""A third-party package, from its built wheel: installing it is all it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

import weightloaders

PLUGIN = Path(__file__).parents[1] / "plugins" / "weightloaders-npz"


def run(*command: object, **options: object) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WEIGHTLOADERS_DISABLE")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment | options, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with the wheel in it, which sees what is installed around the tests."""
    folder = tmp_path_factory.mktemp("npz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, PLUGIN)
    (wheel,) = folder.glob("weightloaders_npz-*.whl")

    venv.create(folder / "venv", with_pip=False)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()
    interpreter = Path(sysconfig.get_path("scripts", scheme, paths)) / Path(sys.executable).name
    # What the tests run with, which `--system-site-packages` would not show: that may be an environment itself.
    outside = [Path(weightloaders.__file__).parents[1], *sysconfig.get_paths().values()]
    site = Path(sysconfig.get_path("purelib", scheme, paths))
    lines = dict.fromkeys(str(path) for path in outside if Path(path).is_dir())
    (site / "outside.pth").write_text("\n".join(lines), encoding="utf-8")
    run(*pip, "--python", interpreter, "install", "--no-deps", "--no-index", wheel)
    return interpreter


def ask(python, code, **options):
    return json.loads(run(python, "-c", f"import json, sys\n{code}", **options))


DESCRIBE = """
from dataclasses import asdict
from weightloaders import WeightLoaderRegistry as registry
found = asdict(registry.describe("npz"))
print(json.dumps([registry.list_available(), found, sorted({"torch", "numpy", "pydantic"} & set(sys.modules))]))
"""


def test_the_wheel_is_listed_with_its_distribution_and_version_and_stays_light(python):
    names, found, heavy = ask(python, DESCRIBE)
    assert "npz" in names
    assert found == {
        "name": "npz",
        "origin": "entry point",
        "distribution": "weightloaders-npz",
        "version": "0.1.0",
        "target": "weightloaders_npz:NpzLoader",
        "status": "ok",
        "error": None,
        "description": "NumPy's .npz archives",
    }
    assert heavy == []


def test_the_wheel_can_be_disabled(python):
    names, found, _ = ask(python, DESCRIBE, WEIGHTLOADERS_DISABLE="weightloaders-npz")
    assert "npz" not in names
    assert found["status"] == "disabled"


def test_the_installed_loader_is_chosen_by_name_and_by_itself(python, tmp_path):
    np.savez(tmp_path / "model.npz", **{"layer.weight": np.arange(6, dtype="f4").reshape(2, 3)})
    code = f"""
import torch, weightloaders, weightloaders_npz
path = {str(tmp_path / "model.npz")!r}
found = []
for loader in ("npz", "weightloaders-npz:npz", "weightloaders_npz:NpzLoader", "auto"):
    with weightloaders.open_weights(path, loader=loader) as weights:
        found.append(weights["layer.weight"].tolist())
model = torch.nn.ModuleDict({{"layer": torch.nn.Linear(3, 2, bias=False)}})
report = weightloaders.load_into(model, path, loader="npz")
found.append(model["layer"].weight.tolist())
print(json.dumps([weightloaders_npz.__file__, found]))
"""
    file, found = ask(python, code)
    assert Path(file).is_relative_to(Path(python).parents[1])
    assert found == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 5
