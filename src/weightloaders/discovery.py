"""What installed distributions offer: entry points read from metadata, and importing one with its failures named.

Nothing here imports a plugin until `imported` is called for it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import os
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from weightloaders import __version__
from weightloaders.errors import BrokenPluginError, LoaderNameError, summary

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "WEIGHTLOADERS_DISABLE"

# The name of a loader, or the suffix or the scheme of what it reads -> the package to install for it.
KNOWN_PACKAGES = {
    "gguf": "weightloaders-gguf",
    "meta": "weightloaders-meta",
    "npz": "weightloaders-npz",
    **dict.fromkeys(("dcp", "distcp", "sharded_state"), "weightloaders-dcp"),
    **dict.fromkeys(("remote", "s3", "gs", "az"), "weightloaders-remote"),
    **{engine: f"'weightloaders-engines[{engine}]'" for engine in ("tensorizer", "runai", "fastsafetensors")},
}

# Those of the same project, also the ones that read nothing.
OUR_PACKAGES = {
    f"weightloaders-{name}" for name in ("checksum", "dcp", "engines", "gguf", "meta", "npz", "remote", "vllm")
}

_UNKNOWN = "unknown"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TARGET = re.compile(r"(?P<module>[\w.]+)\s*(:\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One name that something offers, and where it is defined.

    Args:
        name: The name, e.g. of a loader.
        target: ``"package.module:attribute"``, or only a module.
        distribution: The installed distribution that offers it; None for what this process registered itself.
        version: That distribution's version.
        problem: Why it can't be used, where that shows without importing it.
    """

    name: str
    target: str
    distribution: str | None = None
    version: str | None = None
    problem: str | None = None

    @property
    def label(self) -> str:
        """Who offers it, for people: ``"weightloaders-npz 0.1.0"``."""
        return f"{self.distribution} {self.version}" if self.distribution else "this process"

    def __str__(self) -> str:
        if self.distribution is None:
            return repr(self.target)
        return f"{self.name!r} of {self.label}" + (f" ({self.target})" if self.target else "")

    def comes_from(self, distribution: str) -> bool:
        """Whether that distribution offers it, in any of the spellings that packaging takes for one name."""
        return self.distribution is not None and canonical(self.distribution) == canonical(distribution)

    def is_disabled(self, *, built_in: bool = False) -> bool:
        """Whether ``WEIGHTLOADERS_DISABLE`` lists its name or its distribution, or ``*`` for all third parties."""
        listed = {item.strip() for item in os.environ.get(DISABLE_VARIABLE, "").split(",") if item.strip()}
        if "*" in listed and not built_in and self.distribution is not None:
            return True
        return self.name in listed or any(self.comes_from(item) for item in listed)


def canonical(distribution: str) -> str:
    """A distribution's name as packaging compares it: lower case, runs of ``-_.`` as one hyphen."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def check_name(name: object) -> str:
    """The name itself, if it may be a loader's.

    Raises:
        LoaderNameError: If it is not a lower-case word of letters, digits, ``-``, ``_`` and ``.``.
    """
    if not isinstance(name, str):
        raise LoaderNameError(f"the name of a loader is a string, not {type(name).__name__}: {name!r}")
    if not _NAME.fullmatch(name):
        raise LoaderNameError(
            f"{name!r} can't be the name of a loader",
            hint="use lower-case letters, digits, '-', '_' and '.', starting with a letter or digit",
        )
    return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of the known names, or nothing where none is near."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(by_lower[n]) for n in near)}?" if near else ""


def installed(group: str) -> list[Plugin]:
    """All entry points of a group, sorted by name and distribution. Imports none of them.

    A distribution seen twice counts once: the first on ``sys.path``, as for its modules; of two in one folder (an
    upgrade that left its predecessor's metadata behind) the newer. Metadata that can't be read is passed over.
    """
    chosen: dict[str, tuple[metadata.Distribution, str]] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except Exception as error:  # noqa: BLE001 -- anybody's metadata may be damaged; it is not ours to stumble over
            logger.debug("skipping a distribution whose entry points can't be read: %s", error)
            continue
        if text is None or group not in text:
            continue
        name, version = _identity(distribution)
        # Of those that have lost their name nobody can say whether they are the same.
        key = canonical(name) if name != _UNKNOWN else f"{_UNKNOWN} {len(chosen)}"
        kept = chosen.setdefault(key, (distribution, version))
        if _folder(kept[0]) == _folder(distribution) and _age(version) > _age(kept[1]):
            chosen[key] = (distribution, version)
    plugins = {plugin for distribution, _ in chosen.values() for plugin in _entry_points(distribution, group)}
    named = {(plugin.name, plugin.target) for plugin in plugins if plugin.distribution != _UNKNOWN}
    # A leftover without a name says nothing that its properly installed successor does not say.
    plugins = {p for p in plugins if p.distribution != _UNKNOWN or (p.name, p.target) not in named}
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.distribution or "", plugin.target))


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    try:
        # Only what is there is asked for: a newer Python warns about, or raises for, a field that is absent.
        fields = {key: value for key, value in distribution.metadata.json.items() if key in ("name", "version")}
    except Exception:  # noqa: BLE001 -- an empty, stale or damaged dist-info: each Python has its own way to fail
        fields = {}
    return str(fields.get("name") or _UNKNOWN), str(fields.get("version") or _UNKNOWN)


def _folder(distribution: metadata.Distribution) -> str:
    try:
        return str(distribution.locate_file(""))
    except NotImplementedError:  # a distribution that is not made of files
        return ""


def _age(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _entry_points(distribution: metadata.Distribution, group: str) -> list[Plugin]:
    name, version = _identity(distribution)
    try:
        found = distribution.entry_points.select(group=group)
    except Exception as error:  # noqa: BLE001 -- the parser raises whatever a malformed line leads it to
        problem = f"its entry_points.txt can't be understood: {error}"
        return [Plugin(canonical(name), "", name, version, problem)]
    return [Plugin(e.name, e.value, name, version, _problem(e)) for e in found]


def _problem(entry_point: metadata.EntryPoint) -> str | None:
    try:
        check_name(entry_point.name)
    except LoaderNameError as error:
        return error.message
    if not _TARGET.fullmatch(entry_point.value):
        return f"its entry point {entry_point.value!r} is not of the form 'package.module:name'"
    return None


def import_target(target: str) -> Any:
    """What ``"package.module:attribute"`` names. Raises whatever importing it raises."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ImportError(f"{target!r} is not of the form 'package.module:name'")
    value: Any = importlib.import_module(match["module"])
    for part in (match["attribute"] or "").split("."):
        value = getattr(value, part) if part else value
    return value


def imported(plugin: Plugin) -> Any:
    """Import what a plugin names.

    Raises:
        BrokenPluginError: Whatever the plugin's code raised, an exit of the interpreter included; an interrupt passes.
    """
    if plugin.problem is not None:
        raise BrokenPluginError(f"{plugin} can't be used: {plugin.problem}", plugin=plugin.label)
    try:
        return import_target(plugin.target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise broken(plugin, "can't be imported", error) from error


def _other_version_wanted(plugin: Plugin) -> str | None:
    """What a plugin's distribution requires of this package, where this version is not that."""
    if plugin.distribution is None:
        return None
    from packaging.requirements import Requirement

    with contextlib.suppress(Exception):  # anybody's metadata may be damaged
        for requirement in map(Requirement, metadata.requires(plugin.distribution) or ()):
            is_ours = canonical(requirement.name) == "weightloaders"
            if is_ours and not requirement.specifier.contains(__version__, prereleases=True):
                return f"{requirement.name}{requirement.specifier}"
    return None


def broken(plugin: Plugin, what: str, error: BaseException) -> BrokenPluginError:
    """The error for a plugin that failed: who, where, what, and what to do about it."""
    missing = str(error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    is_its_own = missing == plugin.target.partition(":")[0].partition(".")[0]
    wanted = _other_version_wanted(plugin)
    if wanted:
        remedy = f"install {wanted!r}, which {plugin.distribution} needs; this is weightloaders {__version__}"
    elif missing and not is_its_own:
        remedy = f"install {missing!r}"
    else:
        remedy = f"repair or reinstall {plugin.distribution or plugin.target}"
    switch_off = f", or switch it off with {DISABLE_VARIABLE}={plugin.name}" if plugin.distribution else ""
    return BrokenPluginError(
        f"{plugin} {what}: {summary(error)}",
        plugin=plugin.label if plugin.distribution else None,
        hint=remedy + switch_off,
    )
