"""``weightloaders list``: the loaders there are."""

from __future__ import annotations

from dataclasses import asdict

from weightloaders.cli.common import Json, say_json, say_table
from weightloaders.registry import WeightLoaderRegistry


def list_loaders(json: Json = False) -> None:
    """List the loaders: what each is, where it comes from, and whether it can be used."""
    loaders = WeightLoaderRegistry.describe()
    if json:
        say_json([asdict(loader) for loader in loaders])
        return
    say_table(
        ["name", "origin", "from", "version", "status", ""],
        [
            (d.name, d.origin, d.distribution or "", d.version or "", d.status, d.error or d.description)
            for d in loaders
        ],
    )
