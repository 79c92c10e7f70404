"""Objects as byte sources, and what lies below a prefix as a listing."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weightloaders.errors import RemoteReadError, SourceError, SourceNotFoundError
from weightloaders.loaders.web import UnlistedFolder
from weightloaders.weights.file_names import names_weights
from weightloaders.weights.index import MAX_INDEX_BYTES
from weightloaders.weights.remote import OTHERS_FAULT, Answer, RemoteSource, TransientError, persistently
from weightloaders.weights.texts import read_small
from weightloaders.weights.threads import in_parallel
from weightloaders_remote.faults import fault_of, is_obstores
from weightloaders_remote.stores import FaultError, waited_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightloaders.weights.source import ByteSource
    from weightloaders_remote.addresses import Address
    from weightloaders_remote.faults import Fault
    from weightloaders_remote.stores import Store

# Sub-folders that are looked into for a hint.
_LOOKED_INTO = 8
# What obstore says where the server told no date.
_NO_DATE = datetime(1970, 1, 1, tzinfo=UTC)


class ObjectSource(RemoteSource):
    """An object, or a file on a web server, read by obstore.

    Args:
        store: What it lies in.
        key: Its name there.
        name: How messages call it.
    """

    def __init__(self, store: Store, key: str, name: str) -> None:
        super().__init__(name)
        self._store = store
        self._key = key

    @contextmanager
    def ask(self, start: int, end: int) -> Iterator[Answer]:
        """Ask for a range. See `RemoteSource.ask`."""
        options: dict[str, Any] = {"range": (start, end)}
        if self.known_tag.startswith('"'):
            # Then what has changed is not even sent.
            options["if_match"] = self.known_tag
        try:
            result = self._store.get(self._key, options)
        except FaultError as error:
            fault = error.fault
        else:
            if result.attributes.get("Content-Encoding", "identity").lower() not in ("identity", ""):
                raise self.error(
                    "comes compressed, though it was asked for as it is", hint="turn compression off for it"
                )
            meta = result.meta
            yield Answer(meta["size"], _tag(meta), min(result.range[1], meta["size"]), self._chunks(result))
            return
        if fault.kind == "behind the end" and start == 0:
            # Of what is empty there is no first byte.
            yield self._empty()
            return
        raise self._explained(fault, start)

    def _chunks(self, result: Any) -> Iterator[bytes]:
        # Whatever has come is handed on at once: who trickles is noticed by that.
        stream = iter(result.stream(min_chunk_size=1))
        while True:
            try:
                chunk = waited_for(lambda: next(stream, None))
            except BaseException as error:
                if not is_obstores(error):
                    raise
                fault = fault_of(error)
            else:
                if chunk is None:
                    return
                yield chunk
                continue
            # Out of the `except`, so that the other, whose text may hold a secret, is not its context.
            raise self._explained(fault, 0)

    def _empty(self) -> Answer:
        try:
            meta = self._store.head(self._key)
        except FaultError as error:
            fault = error.fault
        else:
            if meta["size"]:
                raise self.error("is said to lack its first bytes", 416)
            return Answer(0, _tag(meta), 0, ())
        raise self._explained(fault, 0)

    def _explained(self, fault: Fault, start: int) -> Exception:
        if fault.kind == "transient":
            return fault.transient()
        if fault.kind == "changed" or (fault.kind == "behind the end" and start):
            return self.changed()
        return explained(fault, self.name, self._store)


def explained(fault: Fault, name: str, store: Store) -> SourceError:
    """What is no use to try again, in our own errors."""
    if fault.code in ("NoSuchBucket", "ContainerNotFound"):
        return SourceNotFoundError(f"there is no {store.name}", file=name, hint="check its name, region and endpoint")
    if fault.kind == "absent":
        return SourceNotFoundError(
            f"there is nothing at {name} (status {fault.status})", file=name, hint="check the address"
        )
    hint = OTHERS_FAULT
    if fault.region:
        hint = f"the bucket is in another region: region={fault.region!r}"
    elif fault.status == 301 or (fault.kind == "elsewhere" and store.has_regions):
        hint = "the bucket is in another region: give region=..., or set AWS_REGION"
    elif fault.kind == "no credentials" or fault.status in (401, 403, 407):
        hint = store.hint
    elif fault.kind == "bad settings":
        hint = "check what the options and the environment say of the service: endpoint, region, keys"
    elif fault.kind == "bad key":
        hint = "name the weights file itself, or give that object another key"
    elif fault.kind == "no ranges":
        hint = "download it, and name the file on disk"
    return RemoteReadError(f"{name} {fault.what}", file=name, status=fault.status, code=fault.code, hint=hint)


def _tag(meta: Any) -> str:
    tag: str | None = meta["e_tag"]
    if tag:
        # A cache on the way may make a strong tag weak.
        return tag.strip().removeprefix("W/")
    date: datetime = meta["last_modified"]
    return "" if date == _NO_DATE else date.isoformat()


class ObjectFolder:
    """What lies below a prefix: a `weightloaders.Listing`. It is listed when its names are first asked for.

    Where only objects may be read and nothing listed, the usual names are tried.

    Args:
        store: The bucket or container.
        address: Of the folder; a file's name in it is of no account.
    """

    def __init__(self, store: Store, address: Address) -> None:
        self.where = str(address)
        self._store = store
        self._prefix = address.folder
        self._opened: dict[str, ByteSource] = {}

    @property
    def names(self) -> frozenset[str]:
        """The objects right below it.

        Raises:
            SourceNotFoundError: If there is no such bucket, or nothing below the prefix.
            RemoteReadError: If it can't be reached, or does not let us in.
        """
        return self._unlisted.names if self._entries is None else self._entries[0]

    @property
    def odd(self) -> Mapping[str, str]:
        """The prefixes right below it. Raises as `names`."""
        return {} if self._entries is None else self._entries[1]

    @cached_property
    def _entries(self) -> tuple[frozenset[str], dict[str, str]] | None:
        """None where nothing may be listed."""
        try:
            objects, prefixes = self._listed(self._prefix)
        except FaultError as error:
            fault = error.fault
        else:
            names = frozenset(self._inside(entry["path"]) for entry in objects) - {""}
            odd = {self._inside(prefix): "is a folder, not a file" for prefix in prefixes}
            if not names and not odd:
                raise SourceNotFoundError(
                    f"there is nothing below {self.where}/",
                    file=self.where,
                    hint="check the address; a file is told by the end of its name, such as .safetensors",
                )
            return names, odd
        if fault.kind == "refused" and fault.status == 403:
            return None
        raise explained(fault, self.where, self._store)

    def problems(self, names: Sequence[str]) -> dict[str, str]:
        """What is wrong with objects of these relative keys. Raises as `names`."""
        if self._entries is None:
            return self._unlisted.problems(names)
        below = self._look([name for name in names if "/" in name])
        here = {
            name: self.odd.get(name, "is not there") for name in names if "/" not in name and name not in self.names
        }
        return {name: problem for name in names if (problem := here.get(name) or below.get(name))}

    def _look(self, names: Sequence[str]) -> dict[str, str]:
        def problem(name: str) -> str:
            try:
                _ = self.open(name).size
            except SourceNotFoundError:
                return "is not there"
            return ""

        return dict(zip(names, in_parallel(problem, names), strict=True))

    def read(self, name: str) -> bytes:
        """The content of an index."""
        return read_small(self.open(name), MAX_INDEX_BYTES)

    def open(self, name: str) -> ByteSource:
        """An object of that relative key; nothing is asked for yet."""
        if name not in self._opened:
            key = f"{self._prefix}/{name}" if self._prefix else name
            self._opened[name] = ObjectSource(self._store, key, f"{self.where}/{name}")
        return self._opened[name]

    def subfolders_with_weights(self) -> list[str]:
        """Those of the first few prefixes below which names look like weights'."""
        found = []
        for name in sorted(self.odd)[:_LOOKED_INTO]:
            try:
                objects, _ = self._listed(f"{self._prefix}/{name}" if self._prefix else name)
            except (SourceError, FaultError):
                continue
            if any(names_weights(entry["path"].rpartition("/")[2]) for entry in objects):
                found.append(name)
        return found

    @cached_property
    def _unlisted(self) -> UnlistedFolder:
        return UnlistedFolder(self.where, self.open)

    def _listed(self, prefix: str) -> tuple[list[Any], list[str]]:
        """The objects and prefixes right below a prefix. Raises `FaultError` for what is no use to try again."""

        def attempt() -> tuple[list[Any], list[str]]:
            try:
                return self._store.list(prefix)
            except FaultError as error:
                if error.fault.kind != "transient":
                    raise
                fault = error.fault
            raise fault.transient()

        try:
            return persistently(attempt, pause=RemoteSource.pause, patience=RemoteSource.patience)
        except TransientError as error:
            problem = str(error)
            status = error.status
        raise RemoteReadError(
            f"{self.where} {problem}", file=self.where, status=status, hint="check the network, or try again later"
        )

    def _inside(self, key: str) -> str:
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key
