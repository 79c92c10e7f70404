"""How a set of files takes the place of another, so that at every moment a loader finds one of them whole.

No system moves several files at once. But an index is one file, and says which others belong to it: under names of
their own the new files can be laid beside the old ones before it changes, and the old ones removed after that. For what
has no index that can't be; there all of the old files go before any of the new comes: whoever looks in between finds
too few, which is noticed, never a mixture.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

from weightloaders.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Within what is written aside: the old files, while the new ones take their places.
REPLACED = "replaced"
_INDEX = ".index.json"


def exchange(stage: Path, folder: Path, is_outdated: Callable[[str], bool], passing: str | None = None) -> None:
    """Move what lies in ``stage`` into ``folder``, and what it replaces out of it; after an error all is as it was.

    Args:
        stage: Holds the new files, and the old ones in the end.
        folder: Where they belong, on the same file system.
        is_outdated: Whether a file of this name belongs to the old set.
        passing: A new index that is needed only on the way: for a single file, which stands alone in the end.

    Raises:
        OSError: If something can't be moved, or somebody else's file is in the way.
        SaveError: If that can't be undone, either; what was taken out of the folder is then kept in ``stage``.
    """
    # An index comes last: it is what makes the others a checkpoint.
    new = sorted((path.name for path in stage.iterdir()), key=lambda name: (name.endswith(".json"), name))
    there = [path.name for path in folder.iterdir() if path.is_symlink() or path.is_file()]
    old = [name for name in there if name in new or is_outdated(name)]
    if len(new) == 1 and old in ([], new):
        # One file for another: at no moment is there neither.
        (stage / new[0]).replace(folder / new[0])
        return
    aside = stage / REPLACED
    aside.mkdir()
    deciding = _deciding(new, old)
    going = [(folder / name, aside / name) for name in sorted(old, key=lambda name: not name.endswith(_INDEX))]
    coming = [(stage / name, folder / name) for name in new]
    if deciding is None:
        coming = [(origin, target) for origin, target in coming if origin.name != passing]
        with _Moves(folder, aside) as moves:
            for origin, target in (*going, *coming):
                moves.move(origin, target)
        return
    with _Moves(folder, aside) as moves:
        for origin, target in coming:
            if origin.name != deciding:
                moves.move(origin, target)
        moves.replace(stage / deciding, folder / deciding, aside / deciding)
        for origin, target in going:
            if origin.name != deciding:
                moves.move(origin, target)
        if deciding == passing:
            moves.move(folder / deciding, stage / deciding)


def _deciding(new: list[str], old: list[str]) -> str | None:
    """The new file with whose coming a loader turns from the old ones to the new, if there is one."""
    index = next((name for name in new if name.endswith(_INDEX)), None)
    if index is None or set(new) & set(old) - {index}:
        return None
    # Beside others, old files without an index would be taken for a part of the same.
    return index if index in old or len(old) <= 1 else None


class _Moves:
    """Moves of which, after an error, none has happened."""

    def __init__(self, folder: Path, aside: Path) -> None:
        self._folder, self._aside = folder, aside
        self._undo: list[tuple[Path, Path]] = []

    def __enter__(self) -> _Moves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            return
        stuck: OSError | None = None
        for origin, target in reversed(self._undo):
            try:
                if os.path.lexists(origin):
                    origin.replace(target)
                    # Of two names of one file, renaming leaves both.
                    origin.unlink(missing_ok=True)
            except OSError as error:
                stuck = error
        if stuck is not None:
            raise SaveError(
                f"{self._folder} has a part of the new files, and could not be brought back to what it was: "
                f"{stuck.strerror or stuck}",
                file=self._folder,
                hint=f"what was taken out of it is kept in {self._aside}: move it back, or save again",
            ) from stuck

    def move(self, origin: Path, target: Path) -> None:
        # Before it happens, as Ctrl-C may come as soon as it has.
        if not os.path.lexists(target):
            self._undo.append((target, origin))
        move(origin, target)

    def replace(self, origin: Path, target: Path, kept: Path) -> None:
        """Let a file take the place of another, which is kept aside."""
        if os.path.lexists(target):
            try:
                os.link(target, kept, follow_symlinks=False)
            except (OSError, NotImplementedError):
                shutil.copy2(target, kept, follow_symlinks=False)
            self._undo.append((kept, target))
        else:
            self._undo.append((target, origin))
        origin.replace(target)


def move(origin: Path, target: Path) -> None:
    """Rename what must not replace anything.

    Raises:
        FileExistsError: If something is there.
    """
    # Renaming would replace it without a word: what another program, which knows no lock of ours, saved meanwhile.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, f"{target.name} is in the way, and is not of an earlier save")
    origin.rename(target)
