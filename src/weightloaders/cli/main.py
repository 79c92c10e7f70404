"""The program ``weightloaders``: its commands put together."""

from __future__ import annotations

import contextlib
import signal
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer

from weightloaders import __version__
from weightloaders.cli import compare, convert, doctor, generate, inspect, list, new_plugin, plan, verify  # noqa: A004 -- named as the commands
from weightloaders.cli.common import with_switches
from weightloaders.cli.parsing import Command, Group

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    name="weightloaders",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Any checkpoint, into any PyTorch model: look at it, check it, convert it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Where 1 says that something differs, as diff does, an error is 2.
_LIKE_DIFF = ("compare", "verify")
for name, function in (
    ("list", list.list_loaders),
    ("inspect", inspect.inspect_source),
    ("plan", plan.plan_source),
    ("generate", generate.generate_text),
    ("convert", convert.convert_source),
    ("compare", compare.compare_sources),
    ("verify", verify.verify_source),
    ("doctor", doctor.examine),
    ("new-plugin", new_plugin.new_plugin),
):
    app.command(name, cls=Command)(with_switches(function, trouble=2 if name in _LIKE_DIFF else 1))


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"weightloaders {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program. Exit status: 0 done, 1 an error or a difference, 2 a mistake in the command line.

    Of what compares, as diff: 1 a difference, 2 an error.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks shall not end the program.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _ending_cleanly():
        app()


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Have the program, when it is told to end, undo what it has begun, as it does after Ctrl-C."""
    status = 0

    def end(number: int, _: object) -> None:
        nonlocal status
        # Once is enough: another shall not disturb the undoing.
        if not status:
            status = 128 + number
            raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What was started to outlive its terminal (nohup) ignores one of them, and is to go on doing so.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        if status:
            raise SystemExit(status) from None
        raise
