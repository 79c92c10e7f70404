"""Files where there is no listing to choose them from, as at a web address."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from weightloaders.errors import RemoteReadError, SourceError, SourceNotFoundError
from weightloaders.loaders.hub import hub_endpoint, offline_because
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import names_weights
from weightloaders.weights.http import OFFLINE_HINT, HttpSource, checked
from weightloaders.weights.index import MAX_INDEX_BYTES
from weightloaders.weights.texts import read_small
from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightloaders.weights.source import ByteSource

# The names that are looked for where there are no listings; of the first line that has any, all that are there.
_NAMES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ("consolidated.safetensors.index.json", "consolidated.safetensors"),
)


class UnlistedFolder:
    """A folder whose files are not told: a `weightloaders.Listing` of those with usual names that turn out to be there.

    Args:
        where: The folder, for messages.
        locate: The file of a relative path, be it there or not; nothing is asked for yet.
    """

    odd: Mapping[str, str] = {}

    def __init__(self, where: str, locate: Callable[[str], ByteSource]) -> None:
        self.where = where
        self._locate = locate
        self._located: dict[str, ByteSource] = {}
        self._opened: set[str] = set()
        self._refusals: dict[str, SourceError] = {}

    @property
    def names(self) -> frozenset[str]:
        """The usual names of weights that are there.

        Raises:
            SourceNotFoundError: If there is none.
            RemoteReadError: If the server can't be reached, or shows none.
        """
        for names in _NAMES:
            problems = self.problems(names)
            if len(problems) < len(names):
                return frozenset(names) - problems.keys()
        # Storage services refuse what is not there, rather than tell just anybody that it is not.
        refusal = next((error for error in self._refusals.values() if isinstance(error, RemoteReadError)), None)
        if refusal is not None:
            raise RemoteReadError(
                f"no weights at {self.where}: {refusal.message}",
                file=self.where,
                status=refusal.status,
                hint=refusal.hint,
            )
        looked_for = ", ".join(name for names in _NAMES for name in names)
        raise SourceNotFoundError(
            f"no weights at {self.where}: there is none of {looked_for}", file=self.where, hint=self._way_out()
        )

    def problems(self, names: Sequence[str]) -> dict[str, str]:
        """What is wrong with files of these relative paths, asked for all at once.

        Raises:
            SourceError: If the server can't be reached, or can't be read from in parts.
        """
        new = [name for name in dict.fromkeys(names) if name not in self._opened and name not in self._refusals]
        for name, refusal in zip(new, in_parallel(self._look, new), strict=True):
            if refusal is not None:
                self._refusals[name] = refusal
            else:
                self._opened.add(name)
        return {name: _in_short(self._refusals[name]) for name in names if name in self._refusals}

    def read(self, name: str) -> bytes:
        """The content of an index."""
        return read_small(self.open(name), MAX_INDEX_BYTES)

    def open(self, name: str) -> ByteSource:
        """A file of that relative path."""
        # The same each time: it keeps its beginning, which several may want to see.
        return self._located.setdefault(name, self._locate(name))

    def subfolders_with_weights(self) -> list[str]:
        """None that are known."""
        return []

    def _way_out(self) -> str:
        return "name the file itself, if it is called otherwise"

    def _look(self, name: str) -> SourceError | None:
        try:
            _ = self.open(name).size
        except SourceNotFoundError as error:
            return error
        except RemoteReadError as error:
            if error.status in (401, 403):
                return error
            raise
        return None


class WebFolder(UnlistedFolder):
    """The files below an address.

    Args:
        url: The folder's address. A query in it goes with each request.
        headers: What goes with each request, too.
        subfolder: A folder within it.
        source: What reads a file at an address, with these headers.

    Raises:
        SourceNotFoundError: If it is no address.
        RemoteReadError: If an offline switch is set.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        subfolder: str = "",
        source: Callable[[str, Mapping[str, str]], ByteSource] = HttpSource,
    ) -> None:
        parts = urlsplit(checked(url))
        switch = offline_because()
        if switch is not None:
            raise RemoteReadError(f"{shown(url)} is not asked for: {switch}", file=shown(url), hint=OFFLINE_HINT)
        path = parts.path.rstrip("/") + (f"/{quote(subfolder)}" if subfolder else "")
        self._parts = parts._replace(path=path, fragment="")

        def locate(name: str) -> ByteSource:
            return source(urlunsplit(self._parts._replace(path=f"{path}/{quote(name)}")), headers or {})

        super().__init__(shown(urlunsplit(self._parts)), locate)

    def _way_out(self) -> str:
        hub = urlsplit(hub_endpoint())
        if self._parts.netloc == hub.netloc and self._parts.path.startswith(f"{hub.path}/"):
            repository = "/".join(self._parts.path.removeprefix(f"{hub.path}/").split("/")[:2])
            return f"that is a page about a repository; the repository itself is called hf://{repository}"
        return super()._way_out()


def _in_short(error: SourceError) -> str:
    status = getattr(error, "status", None)
    return f"is not shown (status {status})" if status else "is not there"


def split_address(url: str) -> tuple[str, str]:
    """An address taken apart: that of the folder, and the name of the weights file or index; empty if it names none."""
    parts = urlsplit(checked(url))
    folder, _, name = parts.path.rpartition("/")
    name = unquote(name)
    if not names_weights(name):
        return url, ""
    return urlunsplit(parts._replace(path=folder)), name
