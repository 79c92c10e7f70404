"""How the command line is read and its help shown, where typer's own way leaves something to say."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weightloaders.discovery import did_you_mean


class Group(TyperGroup):
    """The program: its help shows switches without a type."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters, as the help shows them."""
        return _without_types(super().get_params(ctx))


class Command(TyperCommand):
    """A command: likewise, and a mistyped choice brings the nearest."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters, as the help shows them."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, or say what is wrong with them."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            choices = re.fullmatch(r"(?:Value error, )?'(.*?)' is not one of (.*?)\.?", error.message)
            if choices:
                error.message = f"{choices[1]!r} is not one of {choices[2]}" + did_you_mean(
                    choices[1], re.findall(r"'(.*?)'", choices[2])
                )
            raise


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
