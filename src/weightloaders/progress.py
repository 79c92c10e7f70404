"""Progress for people: a bar in bytes on a terminal, a few log lines elsewhere, one switch for off."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightloaders.errors import ConfigError
from weightloaders.report import bytes_text

if TYPE_CHECKING:
    from weightloaders.transfer.engine import ProgressEvent

logger = logging.getLogger(__name__)

ProgressOption = bool | Callable[["ProgressEvent"], object] | None


class Progress:
    """Shows one load's progress; a context manager that can be called with each event.

    Args:
        option: None (a bar on a terminal, else a few log lines), True (a bar in any case), False (nothing), or a
            function that gets every `ProgressEvent`. ``WEIGHTLOADERS_PROGRESS=0`` switches bars and lines off.

    Raises:
        ConfigError: If the option is anything else.
    """

    def __init__(self, option: ProgressOption) -> None:
        if option is not None and not isinstance(option, bool) and not callable(option):
            raise ConfigError(f"progress={option!r}: None, True, False or a function is expected")
        self._function = option if callable(option) else None
        shown = self._function is None and option is not False and _switched_on() and _first_rank()
        # A program without a console has no stderr.
        self._with_bar = shown and sys.stderr is not None and (option is True or sys.stderr.isatty())
        self._with_lines = shown and not self._with_bar
        self._bar: Any = None
        self._file: str | None = None
        self._next_quarter = 1

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, event: ProgressEvent) -> None:
        """Show an event."""
        if self._function is not None:
            self._function(event)
        elif self._with_bar:
            self._draw(event)
        elif self._with_lines and event.total_bytes and 4 * event.done_bytes >= self._next_quarter * event.total_bytes:
            self._next_quarter = 4 * event.done_bytes // event.total_bytes + 1
            logger.info("%s", _line(event))

    def _draw(self, event: ProgressEvent) -> None:
        if self._bar is None:
            from tqdm import tqdm

            total = event.total_bytes or None
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", leave=False)
        if event.file and event.file != self._file:
            self._file = event.file
            # Not drawn at once: the bar itself decides how often it is worth it.
            self._bar.set_postfix_str(re.split(r"[/\\]", event.file)[-1], refresh=False)
        self._bar.update(event.done_bytes - self._bar.n)


def _line(event: ProgressEvent) -> str:
    line = f"loaded {bytes_text(event.done_bytes)} of {bytes_text(event.total_bytes)}"
    return f"{line}, {bytes_text(event.bytes_per_second)}/s" if event.bytes_per_second else line


def _switched_on() -> bool:
    return os.environ.get("WEIGHTLOADERS_PROGRESS", "1").strip().lower() not in ("0", "false", "off", "no")


def _first_rank() -> bool:
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
