"""`fake_distribution`: real metadata and real modules in a folder, installed for the length of a block."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@contextlib.contextmanager
def fake_distribution(
    folder: str | Path,
    name: str,
    version: str = "1.0",
    *,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: Iterable[str] = (),
) -> Iterator[Path]:
    """Install a distribution for the length of a block.

    Args:
        folder: Where its folder is made, e.g. pytest's ``tmp_path``.
        name: The distribution's name.
        version: Its version.
        entry_points: Group -> name -> ``"package.module:attribute"``.
        modules: Module name, dotted for a submodule -> its source. They are forgotten at the end, so that another
            test may bring other modules of the same names.
        requires: What its metadata says that it needs, e.g. ``"weightloaders>=2"``.

    Yields:
        The folder that was put in front of ``sys.path``.
    """
    site = Path(folder) / f"{name}-{version}"
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    fields = [
        ("Metadata-Version", "2.1"),
        ("Name", name),
        ("Version", version),
        *(("Requires-Dist", r) for r in requires),
    ]
    _write(metadata / "METADATA", "".join(f"{key}: {value}\n" for key, value in fields))
    sections = (
        "\n".join([f"[{group}]", *(f"{key} = {target}" for key, target in targets.items())])
        for group, targets in (entry_points or {}).items()
    )
    _write(metadata / "entry_points.txt", "\n\n".join(sections) + "\n")
    for module, source in (modules or {}).items():
        is_package = any(other.startswith(f"{module}.") for other in modules or {})
        _write_module(site, module.split("."), source, is_package=is_package)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        for module in [m for m in sys.modules if m in (modules or {}) or _is_inside(m, site)]:
            del sys.modules[module]
        importlib.invalidate_caches()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_module(site: Path, parts: list[str], source: str, *, is_package: bool) -> None:
    path = site.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    for depth in range(1, len(parts)):
        (site.joinpath(*parts[:depth]) / "__init__.py").touch()
    if is_package:
        path.mkdir(exist_ok=True)
    _write(path / "__init__.py" if is_package else path.with_suffix(".py"), source)


def _is_inside(module: str, site: Path) -> bool:
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and Path(file).is_relative_to(site)
