"""`weightloaders new-plugin`: which names it takes, and what it writes; `test_plugin_wheels.py` installs the result."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import weightloaders
from weightloaders import BaseWeightLoader
from weightloaders.cli.main import app
from weightloaders.cli.new_plugin import write_plugin
from weightloaders.discovery import OUR_PACKAGES
from weightloaders.errors import LoaderNameError, SaveError
from weightloaders.testing import fake_distribution, isolated_registry


def run(*arguments):
    return CliRunner().invoke(app, ["new-plugin", *map(str, arguments)])


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def test_a_whole_package_is_written_and_said_how_to_try_it(tmp_path):
    done = run("acme", "--path", tmp_path / "deep" / "er")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "deep" / "er" / "weightloaders-acme"
    assert set(files_in(folder)) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "pyproject.toml",
        "src/weightloaders_acme/__init__.py",
        "src/weightloaders_acme/loader.py",
        "src/weightloaders_acme/py.typed",
        "tests/test_acme_loader.py",
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"weightloaders.loaders": {"acme": "weightloaders_acme:AcmeLoader"}}
    assert project["dependencies"] == [f"weightloaders>={weightloaders.__version__}"]
    assert f"pip install --editable '{folder}[test,lint]'" in done.output
    assert not [name for name, path in files_in(folder).items() if b"@acme" in path.read_bytes()]
    assert not [name for name, path in files_in(folder).items() if b"@name@" in path.read_bytes()]


def test_the_folder_may_begin_with_a_tilde_and_hold_spaces_and_what_is_printed_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("acme", "--path", "~/it's here")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "it's here" / "weightloaders-acme"
    assert folder.is_dir()
    lines = [shlex.split(line) for line in done.output.splitlines() if line.startswith("  ")]
    assert ["pip", "install", "--editable", f"{folder}[test,lint]"] in lines
    assert ["pytest", str(folder)] in lines


def test_the_folder_of_a_user_who_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("acme", "--path", "~nobody-of-that-name/x")
    assert done.exit_code != 0
    assert "there is no such user" in done.output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x", "acme", "my-format_2", "weightloaders-acme", "a" * 30])
def test_what_is_written_is_formatted_and_has_nothing_for_a_linter_whatever_the_name(tmp_path, name):
    folder = write_plugin(name, tmp_path)
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_working_directory_is_where_it_is_written_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("weightloaders-acme").exit_code == 0
    assert (tmp_path / "weightloaders-acme" / "src" / "weightloaders_acme").is_dir()


@pytest.mark.parametrize(
    "name", ["", "Acme", "9lives", "a--b", "-a", "a-", "a.b", "a b", "a/b", "../a", "é", "a\n", "a" * 31]
)
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(LoaderNameError, match="can't be the name of a loader and a package"):
        write_plugin(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf", "is a built-in loader"),
        ("weightloaders-local", "is a built-in loader"),
        ("class", "is a word of Python's own"),
        ("gguf", "belongs to the package weightloaders-gguf"),
        ("s3", "belongs to the package weightloaders-remote"),
        ("checksum", "belongs to the package weightloaders-checksum"),
        ("vllm", "belongs to the package weightloaders-vllm"),
        ("weightloaders-engines", "belongs to the package weightloaders-engines"),
        ("safetensors", "files that end in .safetensors are read by built-in loaders"),
        ("pth", "files that end in .pth are read by built-in loaders"),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path, name, said):
    done = run(name, "--path", tmp_path)
    assert done.exit_code == 1
    assert said in done.output
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_loader_that_is_known_here_is_refused(tmp_path):
    class Mine(BaseWeightLoader):
        def get_weights(self, model_name_or_path):
            return {}

    with isolated_registry() as registry:
        registry.register("mine", Mine)
        with pytest.raises(LoaderNameError, match="is the name of a loader that is installed here"):
            write_plugin("mine", tmp_path)


def test_every_package_of_this_project_is_kept_from_being_written_once_more():
    plugins = Path(__file__).parents[1] / "plugins"
    assert {folder.name for folder in plugins.iterdir() if (folder / "pyproject.toml").exists()} == OUR_PACKAGES


def test_a_package_that_is_here_under_another_loaders_name_is_not_written_once_more(tmp_path):
    with (
        fake_distribution(tmp_path / "site", "weightloaders-in-house", "2.1"),
        pytest.raises(LoaderNameError, match=r"there is a package weightloaders-in-house 2\.1 here already"),
    ):
        write_plugin("in_house", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_what_is_written_says_where_another_format_goes_and_these_places_are_there(tmp_path):
    folder = write_plugin("acme", tmp_path)
    said = (folder / "README.md").read_text().split("## Put your format in")[1].split("## Working on it")[0]
    loader, tests = (folder / "src/weightloaders_acme/loader.py"), (folder / "tests/test_acme_loader.py")
    for path in (loader, tests):
        assert path.relative_to(folder).as_posix() in said
    for name, path in {
        "_tensors": loader,
        "_BEGINNINGS": loader,
        "probe_listing": loader,
        "file_pattern": loader,
        "description": loader,
        "write": tests,
        "DTYPES": tests,
    }.items():
        assert f"`{name}`" in said
        assert name in path.read_text()


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_there_is_not_touched(tmp_path, is_folder):
    there = tmp_path / "weightloaders-acme"
    if is_folder:
        there.mkdir()
        (there / "README.md").write_text("mine")
    else:
        there.write_text("mine")
    before = {name: path.read_text() for name, path in files_in(tmp_path).items()}
    with pytest.raises(SaveError, match="is there already, and nothing in it was changed"):
        write_plugin("acme", tmp_path)
    assert {name: path.read_text() for name, path in files_in(tmp_path).items()} == before


def test_where_nothing_can_be_written_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="can't be made"):
        write_plugin("acme", tmp_path / "file")

    from weightloaders.cli import new_plugin

    def full(folder, fields):
        (folder / "pyproject.toml").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_plugin, "_write", full)
    with pytest.raises(SaveError, match="No space left on device"):
        write_plugin("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


DAMAGED = {
    "not json\n": "is no JSON",
    "{}\n": "no list of tensors",
    '[["w", "float32"]]\n': "not [name, dtype, [sizes]]",
    '[["w", "float32", [true]]]\n': "not [name, dtype, [sizes]]",
    '[["w", "float32", [-1]]]\n': "not [name, dtype, [sizes]]",
    '[["w", "complex64", [1]]]\n': "unknown dtype 'complex64'",
    '[["w", "float32", [1152921504606846976]]]\n': "reaches beyond the end",
    '[["w", "float32", [0]]]\nmore': "describes",
    '[["w", "float32", [0]], ["w", "float32", [0]]]\n': "two tensors named 'w'",
    "[]": "does not begin with a line of JSON",
    "[" * 100_000 + "\n": "is no JSON",
}  # fmt: skip


def test_the_loader_that_is_written_refuses_what_does_not_fit(tmp_path):
    folder = write_plugin("acme", tmp_path)
    for i, content in enumerate(DAMAGED):
        (tmp_path / f"{i}.acme").write_text(content)
    code = f"""
import json, sys
sys.path.insert(0, {str(folder / "src")!r})
from weightloaders import open_weights
from weightloaders.errors import SourceError
from weightloaders_acme import AcmeLoader
said = []
for i in range({len(DAMAGED)}):
    try:
        open_weights({str(tmp_path)!r} + f"/{{i}}.acme", AcmeLoader)
        said.append("")
    except SourceError as error:
        said.append(error.message)
print(json.dumps(said))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for said, expected in zip(json.loads(done.stdout), DAMAGED.values(), strict=True):
        assert expected in said
