"""Repositories on the Hugging Face Hub, and their snapshots in its cache.

The cache's layout (``models--org--name/{refs,blobs,snapshots}``) is documented at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache. It is read without a lock and without the network.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from weightloaders.errors import (
    IncompleteCheckpointError,
    OptionsError,
    RemoteReadError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
)
from weightloaders.loaders.headers_only import asked_once, only_headers_are_wanted
from weightloaders.loaders.hub_files import HubFiles
from weightloaders.loaders.hub_trouble import explained, patiently
from weightloaders.weights.discretion import keep_secrets_out_of_logs, shown, tells_secrets
from weightloaders.weights.folder import A_FOLDER, NOT_THERE, FolderListing, kind_of
from weightloaders.weights.http import HttpSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightloaders.loaders.place import Place
    from weightloaders.weights.source import ByteSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True)
class HubAccess:
    """How the hub and its cache are reached.

    Args:
        revision: Branch, tag or commit. Default: ``main``.
        cache_dir: The cache. Default: huggingface_hub's own.
        token: A token; True for the saved one, False for none. Default: the saved one, if any.
        local_files_only: Look only into the cache.

    Raises:
        OptionsError: If the token can't be one.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.token, str):
            # Copied tokens often come with a line break. Sent as it is, HTTP's error about it would show the token.
            token = self.token.strip()
            if not re.fullmatch(r"[!-~]+", token):
                raise OptionsError(
                    "what was given as token can't be a token: it is empty, or holds a space or a special character"
                )
            object.__setattr__(self, "token", token)

    @property
    def offline_because(self) -> str | None:
        """The switch that keeps from asking the hub; None if there is none."""
        return "local_files_only=True" if self.local_files_only else offline_because()

    @property
    def cache(self) -> Path:
        """The cache's folder."""
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    @property
    def endpoint(self) -> str:
        """The address of the hub, or of a mirror."""
        return hub_endpoint()


def offline_because() -> str | None:
    """The switch that keeps from asking the network; None if there is none."""
    # huggingface_hub reads these when it is imported; they may be set later.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return f"{name}={os.environ[name]}"
    from huggingface_hub import constants

    return "huggingface_hub's offline mode" if constants.HF_HUB_OFFLINE else None


def hub_endpoint() -> str:
    """The address of the hub, or of a mirror."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def repository_at(place: Place, access: HubAccess) -> Repository:
    """The repository that a name stands for, at the revision that the name or the options give.

    Raises:
        OptionsError: If they give two different ones.
    """
    if place.revision is not None:
        if access.revision not in (None, place.revision):
            raise OptionsError(
                f"two revisions are asked of {place.repository}: {place.revision!r} by its address, "
                f"{access.revision!r} by the option"
            )
        access = replace(access, revision=place.revision)
    return Repository(place.repository, access, place.passed_over)


class Repository:
    """A model repository: its cached snapshot, and its files on the hub.

    Args:
        name: ``org/name``.
        access: How to reach it.
        passed_over: The place here of that name, where what is wanted is not; told if the hub has it neither.
    """

    def __init__(self, name: str, access: HubAccess, passed_over: Path | None = None) -> None:
        self.name = name
        self.access = access
        self._passed_over = passed_over
        self._is_on_hub = False
        self.revision = access.revision or "main"
        self._folder = access.cache / f"models--{name.replace('/', '--')}"
        keep_secrets_out_of_logs()

    def obtain(
        self,
        from_hub: Callable[[HubFiles], T],
        from_cache: Callable[[Path], T],
        suffices: Callable[[T], bool] = lambda _: False,
    ) -> tuple[T, str]:
        """Get something from the hub; from the cache where the hub must not or can't be asked.

        Args:
            from_hub: Gets it, given the repository's files.
            from_cache: Gets it, given the folder of a cached snapshot. Raises `SourceError` if the snapshot lacks it.
            suffices: Whether what the cache has for a fixed commit is surely all there is; then the hub isn't asked.

        Returns:
            What was got, and a note on where from.

        Raises:
            SourceError: If neither has it.
        """
        try:
            return self._obtain(from_hub, from_cache, suffices)
        except SourceError as error:
            lack = self._lack(from_cache)
            if lack is None:
                raise
            raise type(lack)(
                f"{lack.message}; as a repository on the hub: {error.message}",
                file=lack.file,
                hint=lack.hint or error.hint,
            ) from error

    def _lack(self, look: Callable[[Path], object]) -> SourceError | None:
        """What is wrong with the place here that has the repository's name."""
        here = self._passed_over
        kind = None if here is None else kind_of(here)
        if here is None or kind in (None, NOT_THERE):
            return None
        if kind != A_FOLDER:
            return SourceNotFoundError(f"{self.name} {kind}", file=here)
        try:
            look(here)
        except SourceError as error:
            return type(error)(f"{self.name} is a folder here; {error.message}", file=error.file, hint=error.hint)
        return None

    def _obtain(
        self, from_hub: Callable[[HubFiles], T], from_cache: Callable[[Path], T], suffices: Callable[[T], bool]
    ) -> tuple[T, str]:
        switch = self.access.offline_because
        if switch is not None:
            return self._cached(from_cache, switch)
        if re.fullmatch(r"[0-9a-f]{40}", self.revision):
            try:
                result, note = self._cached(from_cache)
                if suffices(result):
                    return result, note
            except SourceError:
                logger.debug("the cache lacks something of %s at %s", self.name, self.revision)
        from huggingface_hub import errors

        # Of whichever HTTP library it uses; failing to connect is one of these too.
        transport_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
        try:
            files = HubFiles(self, *asked_once((self.access.endpoint, self.name, self.revision), self._list))
            self._is_on_hub = True
            result = from_hub(files)
            # What is only looked at is not in the cache, so the cache can't stand for it later.
            if not only_headers_are_wanted():
                self._remember(files.commit)
            return result, f"{self.name} at {files.commit} from {shown(self.access.endpoint)}"
        except RemoteReadError as error:
            return self._stand_in(from_cache, error)
        except SourceError:
            raise
        # hf_xet's errors, and that of a client which another thread has closed after a failed connection, are no more
        # than RuntimeErrors.
        except (
            transport_error, errors.EntryNotFoundError, OSError, RuntimeError, ValueError, KeyError, TypeError
        ) as error:  # fmt: skip
            return self._stand_in(from_cache, error)

    def _stand_in(self, from_cache: Callable[[Path], T], error: Exception) -> tuple[T, str]:
        """What the cache has instead, after the hub failed."""
        from huggingface_hub import errors

        message, beside = explained(error, self).message, ""
        # Somebody who asks for a revision that does not exist is not served an older one.
        if not isinstance(error, errors.RevisionNotFoundError):
            try:
                result, note = self._cached(from_cache)
                logger.warning("%s; used instead, and maybe out of date: %s", message, note)
                return result, f"{note}, maybe out of date, because {message}"
            except SourceError as lack:
                beside = f"; nor can the cache stand in: {lack.message}"
        told = explained(error, self, beside)
        if not self._is_on_hub and self._passed_over is not None and kind_of(self._passed_over) == NOT_THERE:
            # Whoever meant a file shall not have to look for that behind what is wrong with the network.
            told.message = f"there is no file or folder {self.name} here; as a repository on the hub: {told.message}"
        raise told from (None if tells_secrets(error) else error)

    # -- the cache

    def snapshot(self) -> Path:
        """The folder of the cached snapshot of the wanted revision.

        Raises:
            SourceNotFoundError: If there is none.
        """
        snapshots = self._folder / "snapshots"
        commit = self.revision
        # A revision is text from outside, and must not lead out of the cache.
        if ".." not in PurePosixPath(commit).parts and not PurePosixPath(commit).is_absolute():
            reference = self._folder / "refs" / commit
            if kind_of(reference) is None:
                commit = reference.read_text(encoding="utf-8", errors="replace").strip()
            if re.fullmatch(r"\w[\w.-]*", commit) and (snapshots / commit).is_dir():
                return snapshots / commit
        known = sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []
        others = f" (there are {', '.join(known[:4])})" if known else ""
        raise SourceNotFoundError(
            f"the cache {self.access.cache} has no snapshot of {self.name} at {self.revision!r}{others}", file=self.name
        )

    def _cached(self, from_cache: Callable[[Path], T], switch: str = "") -> tuple[T, str]:
        hint = f"load it once without {switch}, so that it is downloaded" if switch else None
        try:
            snapshot = self.snapshot()
        except SourceNotFoundError as error:
            # A name that was not looked up on the hub may well be a folder's, and mistyped.
            absent = switch and not os.path.lexists(self.name)
            here = f"there is no file or folder {self.name} here, and " if absent else ""
            raise SourceNotFoundError(here + error.message, file=error.file, hint=hint) from None
        try:
            return from_cache(snapshot), f"{self.name} at {snapshot.name} from the cache"
        except (IncompleteCheckpointError, SourceNotFoundError) as error:
            raise type(error)(
                f"the cached snapshot of {self.name} is incomplete: {error.message}",
                file=error.file,
                hint=hint or error.hint,
            ) from error

    def _remember(self, commit: str) -> None:
        """Note which commit the revision stands for, as huggingface_hub does, for times without the hub."""
        reference = self._folder / "refs" / self.revision
        try:
            if self.revision != commit and (kind_of(reference) or reference.read_text(encoding="utf-8") != commit):
                reference.parent.mkdir(parents=True, exist_ok=True)
                temporary = reference.with_name(f"{reference.name}.{uuid.uuid4().hex}.tmp")
                temporary.write_text(commit, encoding="utf-8")
                temporary.replace(reference)
        except OSError as error:
            # A cache that can't be written still serves.
            logger.debug("can't note the commit of %s in the cache: %s", self.name, error)

    # -- the hub

    def _list(self) -> tuple[str, frozenset[str]]:
        """The commit that the revision stands for, and the files in it."""
        from huggingface_hub import HfApi, constants

        api = HfApi(endpoint=self.access.endpoint, token=self.access.token)
        # One request, and its reply holds no links to further pages, which could lead around a mirror.
        info = patiently(
            lambda: api.model_info(self.name, revision=self.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        )
        if not info.sha or info.siblings is None:
            raise ValueError("the reply names no commit or no files")
        return info.sha, frozenset(sibling.rfilename for sibling in info.siblings)

    def source(self, file: str, commit: str) -> ByteSource:
        """A file to be read in parts: in the cache if it is there, else on the hub.

        Raises:
            UnsafeCheckpointError: If a link in the cache leads out of it.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        snapshot = FolderListing(self._folder / "snapshots" / commit)
        if not snapshot.problems([file]):
            snapshot.check_links([file])
            return snapshot.open(file)
        url = hf_hub_url(self.name, file, revision=commit, endpoint=self.access.endpoint)
        return HttpSource(url, build_hf_headers(token=self.access.token))

    def check_served(self, files: Sequence[str], commit: str) -> None:
        """Ask about the first file that is not in the cache yet.

        Where the hub fails, huggingface_hub's own attempts go on for half a minute, or as long as it asks to wait.
        """
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        snapshot = self._folder / "snapshots" / commit
        file = next((file for file in files if not (snapshot / file).exists()), None)
        if file is not None:
            url = hf_hub_url(self.name, file, revision=commit, endpoint=self.access.endpoint)
            patiently(lambda: get_hf_file_metadata(url, token=self.access.token, timeout=constants.HF_HUB_ETAG_TIMEOUT))

    def download(self, file: str, commit: str, stopped: Callable[[], bool]) -> Path:
        """The path of a file in the cache, to which it is downloaded if it is not there, unless that was stopped."""
        from huggingface_hub import hf_hub_download

        return Path(
            hf_hub_download(
                self.name,
                file,
                revision=commit,
                cache_dir=self.access.cache,
                token=self.access.token,
                endpoint=self.access.endpoint,
                **_bar_of(file, stopped),
            )
        )


def _bar_of(file: str, stopped: Callable[[], bool]) -> dict[str, Any]:
    """What has the bar of a download named after the file, and ends the download where it was stopped.

    Else it may be named after an address with a signature.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "desc": file})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stopped():
                raise SourceReadError(f"the download of {file} was stopped", file=file)
            return super().update(n)

    # Older ones can't be told.
    return {"tqdm_class": Bar} if "tqdm_class" in inspect.signature(hf_hub_download).parameters else {}
