"""Checks of the loader as a part of a package: found by its name, and light to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from weightloaders.testing.conformance.author import Author, expect, skip
from weightloaders.testing.conformance.sharing import target_of

_SECONDS = 60.0
_IMPORT = """
import importlib, json, sys
module = importlib.import_module({module!r})
print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))
"""
_FIND = """
import json
from dataclasses import asdict
from weightloaders import WeightLoaderRegistry
print(json.dumps([asdict(found) for found in WeightLoaderRegistry.describe()]))
"""


class Package(Author):
    """What is installed is found, and looking at it costs nothing."""

    def test_importing_the_loader_imports_nothing_heavy(self) -> None:
        """`weightloaders list` imports the loader's module, so that must import neither torch nor its like."""
        target = self._own_target()
        if target is None or ":" not in target:
            skip("the loader is not defined in a module that can be imported")
        found = _ask(_IMPORT.format(module=target.partition(":")[0], heavy=self.heavy))
        expect(
            not found,
            f"importing the loader's module imports {', '.join(found)}: import these inside the functions that need "
            "them, and write `from __future__ import annotations`",
        )

    def test_it_is_found_by_its_name(self) -> None:
        """The name that the installed package offers leads to this loader, and says in one line what it is."""
        named = isinstance(self.given_loader, str) and ":" not in self.given_loader
        name = self.given_loader if named else self.name
        # A package may offer the class, or what makes it.
        targets = [] if named else list(filter(None, (self._own_target(), target_of(self.given_loader))))
        listed = _ask(_FIND)
        if name is None:
            same = [d for d in listed if any(_is_same(d["target"], target) for target in targets)]
            if not same:
                skip("no installed package offers this loader")
        else:
            same = [d for d in listed if d["name"] == name]
            expect(same, f"nothing is named {name!r}: is the package installed, and its entry point declared?")
            expect(
                not targets or any(_is_same(d["target"], target) for d in same for target in targets),
                f"{name!r} leads to {same[0]['target']}, not to {' or '.join(targets)}",
            )
        for found in same:
            expect(found["status"] == "ok", f"{found['name']!r} is {found['status']}: {found['error']}")
            expect(found["description"], f"{found['name']!r} has no `description` for `weightloaders list`")

    def _own_target(self) -> str | None:
        """Where the loader is defined: a function that makes it may lie in the tests, with all that they import."""
        given = self.given_loader
        return target_of(given if isinstance(given, str) else self.created_loader())


def _is_same(offered: str, target: str) -> bool:
    """Whether two targets name one loader; a package may offer it from another module than it is defined in."""
    module, _, name = offered.partition(":")
    own_module, _, own_name = target.partition(":")
    return name == own_name and module.partition(".")[0] == own_module.partition(".")[0]


def _ask(code: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("WEIGHTLOADERS_DISABLE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env=environment, timeout=_SECONDS,
    )  # fmt: skip
    expect(done.returncode == 0, f"a new process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
