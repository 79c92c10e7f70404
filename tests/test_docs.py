"""The documentation is true: its snippets run, its links lead somewhere, and its reference leaves nothing out.

Every fenced block of a page is run, compared, written to a file or parsed, by its language:

* ``python`` is run, in one namespace a page, in an empty folder of its own;
* ``text`` right behind a block is what that block prints (``...`` stands for anything);
* ``console`` holds commands (``$ weightloaders ...``), which are run, each with what it prints;
* ``yaml``, ``toml``, ``json`` and ``ini`` are parsed.

Comments, which readers don't see, say otherwise for the block behind them: ``<!-- file: NAME -->`` (it is written there
instead of being run), ``<!-- exits with 1 -->`` and ``<!-- not run: REASON -->``. The Python code in a comment that
begins with ``<!-- setup`` is run where it stands.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

import weightloaders
from weightloaders import errors, hooks
from weightloaders.cli.main import app
from weightloaders.mapping.layouts import LAYOUTS
from weightloaders.offers import BUILT_IN
from weightloaders.testing import isolated_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)])
DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("plugins/*/*.md"))]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))

_BLOCK = re.compile(
    r"^<!--\s*setup\s*\n(?P<setup>.*?)^-->"
    r"|^<!--\s*(?P<mark>file|not run|exits with):?\s*(?P<value>.*?)\s*-->"
    r"|^(?P<fence>`{3,}|:{3,})(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ------------------------------------------------------------------ reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block, or hidden set-up code, with the marks in front of it."""

    language: str
    body: str
    line: int
    marks: dict[str, str]
    follows_closely: bool


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    marks: dict[str, str] = {}
    end = -1
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["mark"]:
            marks[match["mark"]] = match["value"]
            continue
        language = "setup" if match["setup"] is not None else match["language"].strip()
        close = not text[end : match.start()].strip() if end >= 0 else False
        yield Block(language, match["setup"] or match["body"] or "", line, marks, close)
        marks, end = {}, match.end()


# ------------------------------------------------------------------ running a page


class Page:
    """Runs the blocks of one page in its namespace."""

    def __init__(self, path: Path, until_the_end: Callable[[Any], Any] = lambda _: None) -> None:
        self.path = path
        # For set-up code: it may enter contexts that last as long as the page, and hold the page itself to its word.
        self.namespace: dict[str, Any] = {"__name__": "page", "until_the_end": until_the_end}
        self.namespace["PAGE"] = path.read_text(encoding="utf-8")
        self.printed = ""

    def run(self, block: Block) -> None:
        where = f"{_name(self.path)}:{block.line}"
        if "file" in block.marks:
            file = Path(block.marks["file"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body, encoding="utf-8")
        elif "not run" in block.marks:
            assert block.marks["not run"], f"{where} is not run, and doesn't say why"
        elif block.language in ("python", "setup"):
            self._python(block, where)
        elif block.language == "console":
            self._console(block, where)
        elif block.language == "text":
            # Elsewhere `text` is a picture; what it shows can't be checked.
            if block.follows_closely:
                assert_alike(block.body, self.printed, where)
        elif block.language in _PARSERS:
            _PARSERS[block.language](block.body)
        elif not block.language.startswith("{"):
            pytest.fail(f"{where}: a block of {block.language!r} is neither run nor checked nor marked as not run")

    def _python(self, block: Block, where: str) -> None:
        # Line numbers in tracebacks are those of the page.
        code = compile("\n" * block.line + block.body, str(self.path), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self.namespace)
        self.printed = output.getvalue()

    def _console(self, block: Block, where: str) -> None:
        for command, expected in commands_of(block.body):
            words = shlex.split(command, comments=True)
            assert words[0] == "weightloaders", f"{where}: {words[0]!r} can't be run here; mark the block as not run"
            result = CliRunner().invoke(app, words[1:])
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            assert result.exit_code == int(block.marks.get("exits with", 0)), f"{where}: {command}\n{result.output}"
            if expected.strip():
                assert_alike(expected, result.output, where)


def commands_of(body: str) -> Iterator[tuple[str, str]]:
    """Commands with what stands below them."""
    body = body.replace("\\\n", " ")
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def assert_alike(expected: str, printed: str, where: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(expected, printed, flags):
        pytest.fail(f"{where} shows\n{expected}\nbut it prints\n{printed}")


def _parse_ini(text: str) -> None:
    ConfigParser().read_string(text)


_PARSERS: dict[str, Any] = {
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "json": json.loads,
    "ini": _parse_ini,
}


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_the_snippets_of_a_page_run_and_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    blocks = list(blocks_of(path))
    if any(".demo/" in block.body for block in blocks):
        request.getfixturevalue("smollm2_folder")
        (tmp_path / ".demo").symlink_to(ROOT / ".demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with isolated_registry(), contextlib.ExitStack() as stack, _plugins_forgotten():
        page = Page(path, stack.enter_context)
        for block in blocks:
            page.run(block)


@contextlib.contextmanager
def _plugins_forgotten() -> Iterator[None]:
    """A page that builds a plugin gets its own, also where that plugin is installed and was imported before."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("weightloaders_")}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(before)


def test_a_snippet_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("```python\nprint(1, 2, 3)\n```\n\n```text\n1 ... 4\n```\n", encoding="utf-8")
    code, output = blocks_of(path)
    page = Page(ROOT / "README.md")
    page.run(code)
    with pytest.raises(pytest.fail.Exception, match="1 2 3"):
        page.run(output)


# ------------------------------------------------------------------ links


def _slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and MyST make it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _without_blocks(page: Path) -> str:
    return re.sub(r"^(`{3,}).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    return {_slug(h) for h in re.findall(r"^#+ (.*)$", _without_blocks(page), re.MULTILINE)}


@pytest.mark.parametrize("page", DOCUMENTS, ids=_name)
def test_every_link_within_the_project_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(page)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "{toctree}":
                entries = [line.strip() for line in block.body.splitlines() if line.strip() and line[0] != ":"]
                listed |= {(page.parent / entry).resolve().with_suffix(".md") for entry in entries}
    assert {page for page in PAGES if page.is_relative_to(DOCS)} - {DOCS / "index.md"} == listed


# ------------------------------------------------------------------ the reference is complete


def _documented() -> set[str]:
    """What the reference documents from docstrings."""
    found = set()
    for page in REFERENCE:
        found |= set(
            re.findall(r"^\.\. (?:auto\w+|py:decorator):: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        )
    return found


@pytest.mark.parametrize("name", [n for n in weightloaders.__all__ if n != "__version__"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"weightloaders.{name}" in _documented()


@pytest.mark.parametrize(
    "name", [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.WeightLoadersError)]
)
def test_every_error_is_in_the_reference(name: str) -> None:
    assert f"weightloaders.errors.{name}" in _documented()


def _sections(page: Path, level: str) -> dict[str, str]:
    parts = re.split(rf"^{level} (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {heading.strip("` "): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("hook", [n for n in vars(hooks.HookSpecs) if not n.startswith("_")])
def test_every_hook_has_its_section_with_its_arguments(hook: str) -> None:
    section = _sections(DOCS / "reference" / "hooks.md", "##").get(hook)
    assert section is not None
    arguments = [p for p in inspect.signature(getattr(hooks.HookSpecs, hook)).parameters if p != "self"]
    assert f"def {hook}({', '.join(arguments)})" in section


@pytest.mark.parametrize("name", [command.name for command in app.registered_commands])
def test_every_command_has_its_section_with_exactly_its_options(name: str) -> None:
    import typer.main

    page = DOCS / "reference" / "cli.md"
    section = _sections(page, "##").get(f"weightloaders {name}")
    assert section is not None
    [info] = [command for command in app.registered_commands if command.name == name]
    parameters = typer.main.get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None).params
    options = {o for p in parameters for o in p.opts if o.startswith("--")}
    shared = _options_in_table(_sections(page, "##")["Switches of every command"])
    assert _options_in_table(section) == options - shared
    assert shared <= options


def _options_in_table(text: str) -> set[str]:
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {option for cell in cells for option in re.findall(r"`(--[\w-]+)", cell)}


def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` builds it: each name in a docstring leads somewhere, each page is well formed."""
    pytest.importorskip("sphinx")
    [recipe] = re.findall(
        r"^\t\$\(BIN\)/sphinx-build (.*) docs/_build/html$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    command = [sys.executable, "-m", "sphinx", *recipe.split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ what is said about the code itself


def test_the_rooms_are_listed_in_the_order_that_import_linter_holds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [layers] = [c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    text = (DOCS / "explanation" / "rooms.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == layers[::-1]


def test_every_key_of_a_config_file_and_every_ready_made_function_is_in_the_reference() -> None:
    assert {"weightloaders.config.LLMConfig", *(f"weightloaders.mapping.layouts.{n}" for n in LAYOUTS)} <= _documented()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_loader_has_its_section(name: str) -> None:
    assert BUILT_IN[name].replace(":", ".") in _sections(DOCS / "reference" / "loaders.md", "##")[name]
