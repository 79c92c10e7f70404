"""``weightloaders doctor``: what there is on this machine that a load depends on, and what is wrong with it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weightloaders import __version__
from weightloaders.cli.common import counted, say, say_table
from weightloaders.errors import ConfigError
from weightloaders.report import bytes_text
from weightloaders.weights.habits import asked_for, usable_processors
from weightloaders.weights.storage import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "pydantic",
    "pluggy",
    "typer",
    "rich",
    "tqdm",
    "PyYAML",
)
_MODULES = ("torch", "transformers", "safetensors", "huggingface_hub")
_VARIABLES = (
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN",
    "WEIGHTLOADERS_DISABLE", "WEIGHTLOADERS_PROGRESS", "WEIGHTLOADERS_STORAGE", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)  # fmt: skip
_SECRET = ("HF_TOKEN",)

# What is examined, what was found, and whether that is a problem.
Finding = tuple[str, str, bool]


def examine() -> None:
    """Show versions, loaders, storage and settings. Exit status 1 if something is broken."""
    problems = []
    for title, examined in (
        ("versions", _versions),
        ("loaders", _loaders),
        ("accelerators", _accelerators),
        ("machine", _machine),
        ("environment", _environment),
    ):
        findings = _guarded(examined)
        if not findings:
            continue
        say(title)
        say_table(["", "", ""], [("  " + what, found, "PROBLEM" if bad else "") for what, found, bad in findings])
        problems += [f"{what}: {found}" for what, found, bad in findings if bad]
    say(counted(len(problems), "problem") if problems else "no problems")
    if problems:
        raise typer.Exit(1)


def _guarded(examined: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What was found until the end, or until something broke: a doctor outlives what it finds."""
    findings: list[Finding] = []
    try:
        findings.extend(examined())
    except Exception as error:  # noqa: BLE001
        findings.append(("stopped", _said(error), True))
    return findings


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _versions() -> Iterator[Finding]:
    yield "weightloaders", f"{__version__} in {Path(__file__).parents[1]}", False
    yield "Python", f"{platform.python_version()} on {platform.platform()}", False
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package), False
        except metadata.PackageNotFoundError:
            yield package, "is not installed", True
    for module in _MODULES:
        # Installed is not yet usable: a torch built for another machine fails at this point.
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            yield module, f"can't be imported: {_said(error)}", True


def _loaders() -> Iterator[Finding]:
    from weightloaders.registry import WeightLoaderRegistry

    for loader in WeightLoaderRegistry.describe():
        where = " ".join(filter(None, (loader.distribution, loader.version))) or loader.origin
        said = f"{loader.status} ({where})" + (f": {loader.error}" if loader.error else "")
        yield loader.name, said, loader.status in ("broken", "conflict")


def _accelerators() -> Iterator[Finding]:
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not count:
        yield "none", "models run on the CPU", False
    for i in range(count):
        yield f"{torch.accelerator.current_accelerator()}:{i}", "available", False


def _machine() -> Iterator[Finding]:
    yield "cores", f"{usable_processors()} usable of {os.cpu_count()}", False
    memory = {key: value.split() for key, _, value in (line.partition(":") for line in _lines_of("/proc/meminfo"))}
    if "MemTotal" in memory and "MemAvailable" in memory:
        # The kernel's kB are of 1024 bytes.
        total, available = (int(memory[key][0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        yield "memory", f"{bytes_text(available)} available of {bytes_text(total)}", False
    pages = _text_of("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    if pages:
        off = "[never]" in pages
        yield "huge pages", pages + (" (loading faults in every small page, which is slower)" if off else ""), False
    for what, path in (("working directory", Path.cwd()), ("hub cache", _hub_cache())):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        usage = shutil.disk_usage(there)
        lies_on = storage_of(there)
        said = f"{lies_on.filesystem}, {lies_on.kind} ({lies_on.why})".removeprefix(", ")
        yield what, f"{path}: {bytes_text(usage.free)} free of {bytes_text(usage.total)}, {said}", False


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _lines_of(path: str) -> list[str]:
    return _text_of(path).splitlines()


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _environment() -> Iterator[Finding]:
    for variable in _VARIABLES:
        value = os.environ.get(variable)
        if value is not None:
            problem = _problem_of(variable)
            yield variable, ("is set" if variable in _SECRET else value) + problem, bool(problem)


def _problem_of(variable: str) -> str:
    if variable != "WEIGHTLOADERS_STORAGE":
        return ""
    try:
        asked_for()
    except ConfigError as error:
        return f" ({error.message.partition(', ')[2]}; {error.hint})"
    return ""
