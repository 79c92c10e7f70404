"""What the commands share: switches, options of loaders, output, and errors as messages rather than tracebacks."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from weightloaders.cli.hints import for_command_line
from weightloaders.discovery import did_you_mean
from weightloaders.errors import OptionsError, WeightLoadersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Source = Annotated[str, typer.Argument(metavar="SRC", help="A folder, a file, a hub id or an address.")]
LOADER = typer.Option("--loader", "-l", metavar="NAME", help="The loader, by name or as package.module:Class.")
Loader = Annotated[str, LOADER]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="NAME=VALUE", help="An option of the loader; the value is YAML. May be repeated.",
        show_default=False,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Rules = Annotated[
    str | None,
    typer.Option("--rules", metavar="FILE", help="A YAML file of renames, drops and conversions."),
]
_POLICY = "error, warn or ignore; or PATTERN=one of these, which may be repeated."
OnMissing = Annotated[
    list[str] | None,
    typer.Option(metavar="POLICY", help=f"Parameters without a tensor: {_POLICY} Default: error.", show_default=False),
]
OnUnexpected = Annotated[
    list[str] | None,
    typer.Option(metavar="POLICY", help=f"Tensors without a place: {_POLICY} Default: warn.", show_default=False),
]
OnMismatch = Annotated[
    list[str] | None,
    typer.Option(metavar="POLICY", help=f"Tensors that don't fit: {_POLICY} Default: error.", show_default=False),
]
NoAutomatic = Annotated[
    bool,
    typer.Option("--no-automatic", help="Take names as they are, but for --rules and what the model itself declares."),
]
Transfer = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="How bytes are moved: direct (the default), mmap, o_direct or stream; or fields, as in '{threads: 2}'.",
        show_default=False,
    ),
]
Verify = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHECK",
        help="Additional checks: sha256 (or sha256=FILE, a list of checksums), finite, record. May be repeated.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let code that lies with the model run. Only for models you trust.")
]

_SWITCHES = {
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors: no progress, no remarks.")],
    "no_progress": Annotated[
        bool, typer.Option("--no-progress", help="No progress; WEIGHTLOADERS_PROGRESS=0 does the same.")
    ],
    "debug": Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")],
}


@dataclass(slots=True)
class Settings:
    """What the switches of the running command say."""

    quiet: bool = False
    results: TextIO | None = None
    """Where results go; None for standard output."""
    progress: bool | None = None
    """For the functions of `weightloaders.api`: None to show it in the way that fits the output, False for none."""


settings = Settings()


def with_switches(function: Callable[..., None], trouble: int = 1) -> Callable[..., None]:
    """Add the switches that every command has, and turn errors into messages and an exit status.

    Args:
        function: The command.
        trouble: The exit status after an error.
    """

    @functools.wraps(function)
    def run(*args: Any, quiet: bool, no_progress: bool, debug: bool, **kwargs: Any) -> None:
        settings.quiet = quiet
        settings.progress = False if quiet or no_progress else None
        level = logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO
        with _logging_to_stderr(level), _modules_here(kwargs), _results_alone_on_stdout():
            try:
                function(*args, **kwargs)
            except (WeightLoadersError, OSError) as error:
                # A closed pipe is how `... | head` ends; typer knows.
                if debug or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                    raise
                remark(for_command_line(f"error: {error}"))
                raise typer.Exit(trouble) from error

    own = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=False)
        for name, annotation in _SWITCHES.items()
    ]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _logging_to_stderr(level: int) -> Iterator[None]:
    # Undone afterwards, so that several commands can run in one process.
    logger = logging.getLogger("weightloaders")
    before, propagated = logger.level, logger.propagate
    handler = logging.StreamHandler(_Stderr())
    handler.setFormatter(logging.Formatter("%(message)s" if level > logging.DEBUG else "%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagated


@contextlib.contextmanager
def _results_alone_on_stdout() -> Iterator[None]:
    """Have what others print, a plugin that is imported for one, go to standard error: results may be for programs."""
    before, settings.results = settings.results, sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        settings.results = before


# Arguments that name modules, or files that do.
_LOADERS = ("loader", "loader_a", "loader_b")
_FILES = ("config", "rules")


@contextlib.contextmanager
def _modules_here(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let the working directory's modules be imported where the command names some.

    Only there, and behind all others: it may be a downloaded checkpoint's folder, whose code must not pass for the
    modules that the program itself imports.
    """
    named = any(":" in str(arguments.get(name)) for name in _LOADERS) or any(arguments.get(name) for name in _FILES)
    here = str(Path.cwd())
    if not named or here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


class _Stderr:
    """Standard error as it is at the time of writing, with nothing that could steer the terminal."""

    def write(self, text: str) -> None:
        sys.stderr.write(printable(text))

    def flush(self) -> None:
        sys.stderr.flush()


# ------------------------------------------------------------------ what goes in


def loader_options(given: Sequence[str] | None) -> dict[str, Any]:
    """Options of a loader from ``name=value`` arguments, each value read as YAML; one with a star in front is text.

    Raises:
        OptionsError: If an argument has another form, or a name is given twice.
    """
    from weightloaders.weights.texts import parse_yaml

    options: dict[str, Any] = {}
    for item in given or ():
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise OptionsError(f"--option takes NAME=VALUE, not {item!r}")
        if name in options:
            raise OptionsError(f"--option {name} is given twice")
        try:
            # A glob, whose star would make it an alias.
            options[name] = text if text.startswith("*") else parse_yaml(text)
        except ValueError as error:
            raise OptionsError(f"the value of --option {name} is no valid YAML: {error}") from error
    return options


def transfer_option(text: str | None) -> Any:
    """How bytes are moved, as `load_into` and the like take it, from the name of a mode or a YAML mapping.

    Raises:
        OptionsError: If it is no YAML.
    """
    from weightloaders.weights.texts import parse_yaml

    try:
        return None if text is None else parse_yaml(text)
    except ValueError as error:
        raise OptionsError(f"the value of --transfer is no valid YAML: {error}") from error


def checks(given: Sequence[str] | None) -> list[Any] | None:
    """Additional checks, as `load_into` and the like take them."""
    split = [(item.partition("="), item) for item in given or ()]
    return [{name: file} if file else item for (name, _, file), item in split] or None


def names_a_file(source: str) -> bool:
    """Whether it is one file, on disk or at an address, rather than a folder or a repository."""
    from weightloaders.loaders.web import split_address
    from weightloaders.weights.http import is_web_address

    if is_web_address(source):
        return bool(split_address(source)[1])
    # pathlib fails where there is no such user, and at some names.
    return os.path.isfile(os.path.expanduser(source))  # noqa: PTH111, PTH113


def policies(**given: Sequence[str] | None) -> dict[str, Any]:
    """The policies that were given, as `plan_load` and the like take them, by the names of their arguments.

    Raises:
        OptionsError: If one is no policy.
    """
    return {name: _policy(name, items) for name, items in given.items() if items}


def _policy(name: str, items: Sequence[str]) -> str | dict[str, str]:
    option = "--" + name.replace("_", "-")
    found: dict[str, str] = {}
    for item in items:
        pattern, _, decision = item.rpartition("=")
        if decision not in _DECISIONS:
            raise OptionsError(
                f"{option} can't be {decision!r}{did_you_mean(decision, _DECISIONS)}",
                hint=f"it is {', '.join(_DECISIONS)}, or PATTERN= and one of these",
            )
        if pattern in found:
            raise OptionsError(f"{option} {f'for {pattern!r} ' * bool(pattern)}is given twice")
        found[pattern] = decision
    # What was said without a pattern is for those that no pattern matches.
    rest = found.pop("", None)
    if rest is None:
        return found
    return {**found, "**": rest} if found else rest


_DECISIONS = ("error", "warn", "ignore")


def rules_file(path: str | None) -> Any:
    """Rules as `plan_load` and the like take them, from the path of a file."""
    return None if path is None else Path(path)


# ------------------------------------------------------------------ what comes out


def results() -> TextIO:
    """Where results go."""
    return settings.results or sys.stdout


def printable(text: str) -> str:
    """Text from a checkpoint, with what could steer a terminal written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Print a line of the result."""
    results().write(printable(text) + "\n")


def remark(text: str) -> None:
    """Print a line that is not the result, to standard error."""
    sys.stderr.write(printable(text) + "\n")


def counted(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def say_json(value: Any) -> None:
    """Print the result for programs."""
    results().write(json.dumps(value, indent=2) + "\n")


def say_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table: folded to its width on a terminal, a line a row elsewhere, for other programs.

    Args:
        headings: One a column; none are shown if all are empty.
        rows: What stands in the columns.
        numbers: Headings of the columns that are aligned to the right.
    """
    cells = [[printable(str(cell)).replace("\n", " ") for cell in row] for row in rows]
    if results().isatty():
        _draw_table(headings, cells, numbers)
        return
    lines = [list(headings), *cells] if any(headings) else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            cell.rjust(width) if heading in numbers else cell.ljust(width)
            for cell, width, heading in zip(line, widths, headings, strict=True)
        )
        results().write("  ".join(padded).rstrip() + "\n")


def _draw_table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    Console(file=results(), markup=False, emoji=False, highlight=False).print(table)
