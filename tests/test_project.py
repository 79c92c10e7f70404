"""The project as a whole: what it imports, what it ships, and that its own files agree with each other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import weightloaders

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
PROJECTS = sorted([ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md")])


def _read_toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


# ------------------------------------------------------------------ what the sources must not do


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_library_neither_asserts_nor_prints(file: Path) -> None:
    # `python -O` drops assertions, and standard output belongs to the program that uses the library.
    found = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
    ]
    assert not found


# ------------------------------------------------------------------ importing stays light

# Runs a statement, then tells which heavy packages it imported.
_HEAVY = """
import sys
try:
    {statement}
except SystemExit as stop:
    if stop.code:
        raise
heavy = {{"torch", "transformers", "numpy", "safetensors", "huggingface_hub"}} & set(sys.modules)
print(*sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import weightloaders",
        "import weightloaders; weightloaders.WeightLoaderRegistry.list_available()",
        "import weightloaders; weightloaders.hookimpl",
        "from weightloaders.cli.main import main; sys.argv = ['weightloaders', 'list']; main()",
        "from weightloaders.cli.main import main; sys.argv = ['weightloaders', '--help']; main()",
    ],
)
def test_starting_imports_nothing_heavy(statement: str, third_parties: str) -> None:
    """That is what keeps it quick; `benchmarks/startup.py` measures how quick."""
    code = _HEAVY.format(statement=statement)
    environment = {**os.environ, "WEIGHTLOADERS_DISABLE": third_parties}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].split() == []


# ------------------------------------------------------------------ public names


def test_the_public_names_are_those_that_were_promised() -> None:
    promised = """
        BaseWeightLoader ByteSource Checksum ChecksumList Convert Drop Extent FileCheck FolderListing LLM Listing
        LoadPlan LoadReport Probe Provenance Rename RequestOutput SamplingParams TensorInfo TransferOptions
        WeightLoaderRegistry Weights compare
        default_weight_loader from_pretrained hookimpl load_into load_model load_status
        open_weights plan_load safetensors_weights_iterator save_weights
    """
    assert set(weightloaders.__all__) == {"__version__", *promised.split()}


@pytest.mark.parametrize("name", weightloaders.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(weightloaders, name) is not None
    assert name in dir(weightloaders)


def test_type_checkers_see_the_same_public_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(weightloaders.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert seen == weightloaders._HOMES


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="load_wieghts"):
        weightloaders.load_wieghts  # noqa: B018


# ------------------------------------------------------------------ dependencies


def _constraints() -> dict[str, str]:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    return pins


def _requirements(project: Path) -> list[Requirement]:
    table = _read_toml(project)["project"]
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    return [Requirement(line) for requirements in lists for line in requirements]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_versions_that_were_tested_lie_in_the_ranges_that_are_declared(project: Path) -> None:
    pins = _constraints() | {"weightloaders": weightloaders.__version__}
    unpinned = [r.name for r in _requirements(project) if canonicalize_name(r.name) not in pins]
    outside = [
        str(requirement)
        for requirement in _requirements(project)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert not unpinned
    assert not outside


def test_every_dependency_of_the_library_has_a_lowest_version() -> None:
    loose = [r.name for r in _requirements(ROOT / "pyproject.toml")[:10] if not r.specifier]
    assert not loose


# ------------------------------------------------------------------ the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_the_type_marker_and_the_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"weightloaders-{weightloaders.__version__}.dist-info"
    package = ROOT / "src"
    modules = {str(file.relative_to(package).as_posix()) for file in package.glob("weightloaders/**/*.py")}
    assert modules | {"weightloaders/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {"weightloaders", info}


def test_the_wheel_declares_the_version_and_the_entry_points_of_the_source_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"weightloaders-{weightloaders.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert f"\nVersion: {weightloaders.__version__}\n" in metadata
    assert "[weightloaders.loaders]" in entry_points
    for name, target in _read_toml(ROOT / "pyproject.toml")["project"]["entry-points"]["weightloaders.loaders"].items():
        assert f"{name} = {target}" in entry_points


def test_the_package_works_from_the_wheel_alone(wheel: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import weightloaders; print(weightloaders.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert str(wheel) in done.stdout


# ------------------------------------------------------------------ the project's own files


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_make_command_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^\$? ?make ([a-z-]+)", text, re.MULTILINE))
    assert named <= _make_targets()


def test_every_make_target_is_explained_to_contributors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {target for target in _make_targets() if f"`make {target}" not in text} == set()


def test_the_commit_hooks_run_what_make_check_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = {hook["entry"] for repository in config["repos"] for hook in repository["hooks"]}
    [check] = re.findall(r"^check: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert entries == {f"make {part}" for part in check.split()}
