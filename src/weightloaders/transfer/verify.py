"""`Verification`: what a load is to check beside what it checks anyway, and the checksums of the files before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightloaders.errors import ConfigError, SourceReadError
from weightloaders.weights.checksum_lists import ChecksumList, list_about
from weightloaders.weights.checksums import FileCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource

Check = Literal["finite", "sha256", "record"]
# By name; ``{"sha256": <path of a list>}``; or a list itself.
VerifyOption = (
    Check | Mapping[str, str | Path] | ChecksumList | Iterable[Check | Mapping[str, str | Path] | ChecksumList]
)

_ALLOWED = "None, 'finite', 'sha256', 'record', {'sha256': <a list of checksums>} or several of these are expected"


@dataclass(frozen=True, slots=True)
class Verification:
    """What a load is to check.

    Attributes:
        finite: Whether a parameter that holds NaN or infinity is an error.
        sha256: Whether the files are held against their checksums first.
        record: Whether the report has each parameter's own checksum, and where its bytes came from.
        lists: The lists of checksums that alone are asked. None: what lies beside the files, or the hub's cache.
    """

    finite: bool = False
    sha256: bool = False
    record: bool = False
    lists: tuple[ChecksumList | Path, ...] = ()

    @classmethod
    def of(cls, option: object) -> Verification:
        """What was asked for.

        Raises:
            ConfigError: If there is no such check.
            SourceError: If a list of checksums can't be read, or is none.
        """
        asked = cls()
        several = isinstance(option, Iterable) and not isinstance(option, str | Mapping | ChecksumList)
        for one in option if several else () if option is None else (option,):  # type: ignore[attr-defined]
            asked = asked._with(one, option)
        return asked

    def _with(self, one: object, option: object) -> Verification:
        if isinstance(one, ChecksumList):
            return replace(self, sha256=True, lists=(*self.lists, one))
        if isinstance(one, Mapping) and list(one) == ["sha256"] and isinstance(one["sha256"], str | Path):
            path = Path(one["sha256"]).expanduser()
            # That it is one is seen before anything is opened.
            ChecksumList(path)
            return replace(self, sha256=True, lists=(*self.lists, path))
        if one == "finite":
            return replace(self, finite=True)
        if one == "sha256":
            return replace(self, sha256=True)
        if one == "record":
            return replace(self, record=True)
        raise ConfigError(f"verify={option!r}: {_ALLOWED}")

    def check_files(self, infos: Sequence[TensorInfo], described_by: Iterable[ByteSource] = ()) -> FileCheck:
        """Hold each file that tensors come from against the checksum that is known for it; see `Checksum.known`.

        Args:
            infos: The tensors.
            described_by: Files that say where they are, or how the model is made, which are compared where a checksum
                is known.

        Returns:
            What was compared, and of what nothing is known.

        Raises:
            ConfigError: If it isn't known which file a tensor comes from, so that nothing could be checked.
            SourceReadError: If a file has another checksum, or none is known for it. Nothing was touched.
            SourceError: If what should list the checksums is no such list.
        """
        from_nowhere = next((info.name for info in infos if info.numel and not info.origins), None)
        if from_nowhere is not None or not infos:
            raise ConfigError(
                "verify='sha256': this loader does not say in which files its tensors lie, so nothing can be checked",
                tensor=from_nowhere,
                hint="load without verify, or check the files before",
            )
        read = {origin.name: origin for info in infos for origin in info.origins}
        check = self._check_of([*read.values(), *described_by])
        lacking = next((source.name for source in check.unknown if source.name in read), None)
        if lacking is not None and not os.path.lexists(lacking):
            raise SourceReadError(
                f"verify='sha256': {lacking} lies on no disk of this machine, and is not compared with any checksum",
                file=lacking,
                hint="it would be fetched twice, and could differ the second time: download it, and load that; or "
                "verify='record' tells what each parameter came to, for `weightloaders compare`",
            )
        if lacking is not None:
            by = f", which {' and '.join(str(_path_of(listed)) for listed in self.lists)} should list"
            raise SourceReadError(
                f"verify='sha256': no checksum is known for {lacking}{by if self.lists else ''}",
                file=lacking,
                hint="put <file>.sha256 beside it or SHA256SUMS into its folder, or load without verify"
                if not self.lists
                else "a list's names are relative to its own folder, or to that of the files",
            )
        check.compare()
        check.raise_if_wrong("verify='sha256': ")
        return check

    def check_companions(self, files: Sequence[ByteSource]) -> None:
        """The same for files in which no tensors lie: a config, a tokenizer.

        Raises:
            SourceReadError: If a file has another checksum. One of which none is known is told by `check_files`.
            SourceError: If what should list the checksums is no such list.
        """
        if self.sha256 and files:
            check = self._check_of(files)
            check.compare()
            check.raise_if_wrong("verify='sha256': ")

    def _check_of(self, files: Sequence[ByteSource]) -> FileCheck:
        names = [file.name for file in files]
        lists = [listed if isinstance(listed, ChecksumList) else list_about(listed, names) for listed in self.lists]
        return FileCheck(files, lists, alone=bool(lists))


def _path_of(listed: ChecksumList | Path) -> Path:
    return listed.path if isinstance(listed, ChecksumList) else listed
