"""``weightloaders new-plugin``: a package with a loader that works, to be changed into one's own."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from importlib import metadata, resources
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from weightloaders import __version__
from weightloaders.cli.common import say
from weightloaders.discovery import KNOWN_PACKAGES, OUR_PACKAGES
from weightloaders.errors import LoaderNameError, SaveError
from weightloaders.offers import BUILT_IN
from weightloaders.registry import WeightLoaderRegistry
from weightloaders.weights.file_names import family_of

_PREFIX = "weightloaders-"
_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_LONGEST = 30
_FIELD = re.compile(r"@(\w+)@")
# Template -> the file that is made of it.
_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "CHANGELOG.md.in": "CHANGELOG.md",
    "gitignore.in": ".gitignore",
    "ci.yml.in": ".github/workflows/ci.yml",
    "package.py.in": "src/@module@/__init__.py",
    "loader.py.in": "src/@module@/loader.py",
    "test_loader.py.in": "tests/test_@identifier@_loader.py",
}


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that users will give for the loader.")],
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="Where the package's folder is made.")] = Path(),
) -> None:
    """Write a package with a loader of your own: it works, is tested, and waits for your format."""
    folder = write_plugin(name, _without_tilde(path))
    say(f"{folder} is a package with a loader named {name.removeprefix(_PREFIX)!r}. Try it:")
    say(f"  pip install --editable {shlex.quote(f'{folder}[test,lint]')}")
    say(f"  pytest {shlex.quote(str(folder))}")
    say("  weightloaders list")
    say(f"Then replace the format in src/ by yours; {folder / 'README.md'} says where.")


def _without_tilde(path: Path) -> Path:
    """A path as the shell would have made it, had it not been quoted."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SaveError(
            f"{path} can't be a folder: there is no such user", file=path, hint="write ./~... to mean that"
        ) from error


def write_plugin(name: str, parent: Path) -> Path:
    """Write the package ``weightloaders-NAME`` into a new folder of that name.

    Args:
        name: The loader's name: lower-case letters and digits, with single ``-`` or ``_`` between them.
        parent: The folder that the new one is made in; made itself if absent.

    Returns:
        The new folder.

    Raises:
        LoaderNameError: If the name can't be a loader's and a package's, or means another loader already.
        SaveError: If the folder is there already, or can't be written.
    """
    name = name.removeprefix(_PREFIX)
    _check_name(name)
    identifier = name.replace("-", "_")
    fields = {
        "name": name,
        "identifier": identifier,
        "distribution": _distribution_of(name),
        "module": f"weightloaders_{identifier}",
        "Class": "".join(word.capitalize() for word in identifier.split("_")) + "Loader",
        "version": __version__,
    }
    folder = parent / fields["distribution"]
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise SaveError(
            f"{folder} is there already, and nothing in it was changed",
            file=folder,
            hint="choose another name, or another folder with --path",
        ) from error
    except OSError as error:
        raise SaveError(f"{folder} can't be made: {error.strerror or error}", file=folder) from error
    try:
        _write(folder, fields)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise SaveError(f"{folder} can't be written: {error.strerror or error}", file=folder) from error
        raise
    return folder


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise LoaderNameError(
            f"{name!r} can't be the name of a loader and a package",
            hint="use lower-case letters and digits, beginning with a letter, with single '-' or '_' in between; "
            f"{_LONGEST} characters at most",
        )
    if iskeyword(name):
        raise LoaderNameError(f"{name!r} is a word of Python's own", hint="choose another name")
    if name in BUILT_IN:
        raise LoaderNameError(f"{name!r} is a built-in loader", hint="choose another name")
    distribution = _distribution_of(name)
    package = KNOWN_PACKAGES.get(name) or (distribution if distribution in OUR_PACKAGES else None)
    if package is not None:
        raise LoaderNameError(f"{name!r} belongs to the package {package}", hint=f"pip install {package}")
    if family_of(f"x.{name}") is not None:
        raise LoaderNameError(
            f"files that end in .{name} are read by built-in loaders, so the package's would not be found for its own",
            hint="choose another name",
        )
    if name in WeightLoaderRegistry.list_available():
        raise LoaderNameError(
            f"{name!r} is the name of a loader that is installed here: {WeightLoaderRegistry.describe(name).target}",
            hint="choose another name, or uninstall its package",
        )
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version(distribution)
        raise LoaderNameError(
            f"there is a package {distribution} {version} here already, which this one would take the place of",
            hint="choose another name, or uninstall that package",
        )


def _distribution_of(name: str) -> str:
    return _PREFIX + name.replace("_", "-")


def _write(folder: Path, fields: dict[str, str]) -> None:
    templates = resources.files("weightloaders.cli") / "plugin_template"
    for template, target in _FILES.items():
        text = (templates / template).read_text(encoding="utf-8")
        path = folder / _filled(target, fields)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, fields), encoding="utf-8", newline="\n")
    (folder / "src" / fields["module"] / "py.typed").touch()


def _filled(text: str, fields: dict[str, str]) -> str:
    return _FIELD.sub(lambda field: fields[field[1]], text)
