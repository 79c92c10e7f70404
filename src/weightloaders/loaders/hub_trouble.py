"""Trouble with the hub: what may pass is waited for, for some seconds, and what does not is said in our own words."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from weightloaders.errors import RemoteReadError, SourceError, SourceNotFoundError, SourceReadError
from weightloaders.weights.discretion import shown, without_secrets
from weightloaders.weights.http import TRANSIENT
from weightloaders.weights.remote import RemoteSource, TransientError, persistently

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightloaders.loaders.hub import Repository

logger = logging.getLogger(__name__)

T = TypeVar("T")


def patiently(ask: Callable[[], T]) -> T:
    """What the hub answers; it is asked again, for some seconds, where it says that it may go better then.

    Raises:
        Exception: Whatever huggingface_hub raises, in the end.
    """
    from huggingface_hub import errors

    def attempt() -> T:
        try:
            return ask()
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status not in TRANSIENT:
                raise
            logger.info("the hub answers with status %s", status)
            raise TransientError("", status=status, wait=_wait(error.response)) from error

    try:
        return persistently(attempt, pause=RemoteSource.pause, patience=RemoteSource.patience)
    except TransientError as error:
        raise error.__cause__ or error from None


def _wait(response: Any) -> float:
    """How many seconds a server asks to be left alone."""
    # The hub's own way of saying it: https://huggingface.co/docs/hub/rate-limits
    limit = re.search(r"r=0;\s*t=([0-9]{1,9})", response.headers.get("ratelimit", ""))
    after = re.fullmatch(r"\s*([0-9]{1,9})\s*", response.headers.get("retry-after", ""))
    return float(max(int(limit[1]) if limit else 0, int(after[1]) if after else 0))


def explained(error: Exception, repository: Repository, beside: str = "") -> SourceError:
    """An error of huggingface_hub in our own words.

    Args:
        error: What it raised, or what reading from the hub did.
        repository: Which repository it is about.
        beside: What is to be said after that.
    """
    from huggingface_hub import errors

    name, hub = repository.name, shown(repository.access.endpoint)
    response = _response(error)
    status, gated = getattr(response, "status_code", None), isinstance(error, errors.GatedRepoError)
    if isinstance(error, RemoteReadError):
        status, gated = error.status, error.code == "GatedRepo"
    asked = f"revision {repository.revision!r}" + (f", status {status}" if status else "")
    authorise = "pass token=..., set HF_TOKEN, or run `hf auth login`"

    def unreadable(message: str, hint: str | None) -> SourceReadError:
        return RemoteReadError(message + beside, file=name, status=status, hint=hint)

    def absent(message: str, hint: str | None = None) -> SourceNotFoundError:
        return SourceNotFoundError(message + beside, file=name, hint=hint)

    if gated:
        return unreadable(
            f"{name} is gated, and needs a token of an account that was granted access ({asked})",
            f"ask for access at {hub}/{name}, then {authorise}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return absent(f"{name} has no revision {repository.revision!r} on {hub}")
    if status in (401, 403):
        storage = _elsewhere(response, hub)
        if storage:
            return unreadable(
                f"can't get {name} from {storage}, to which {hub} leads for its files ({asked})",
                "try again, for such an address is good for a while only; if it stays so, check the clock of this "
                "machine, and whether a firewall lets it get there",
            )
        return absent(
            f"{hub} does not show {name} ({asked}): "
            "there is no such repository, or it is private or gated and needs a token",
            f"check the name (a folder on disk is given as ./{name}); or {authorise}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return absent(
            f"there is no repository {name} on {hub} ({asked})",
            f"check the name (a folder on disk is given as ./{name}); if it is private, {authorise}",
        )
    if isinstance(error, RemoteReadError):
        return unreadable(f"can't get {name} from {hub} ({asked}): {error.message}", error.hint)
    if status is not None and status >= 400:
        wait = _wait(response)
        return unreadable(
            f"can't get {name} from {hub} ({asked}){f', which asks to wait {wait:.0f} seconds' if wait else ''}",
            "wait before you try again; with a token more requests are allowed"
            if status == 429
            else "try again later; a snapshot in the cache is used at once with local_files_only=True",
        )
    detail = f"{asked}; {type(error).__name__}: {without_secrets(' '.join(str(error).split()))}"
    if isinstance(error, OSError) and error.errno is not None:
        return SourceReadError(
            f"can't get {name}, because of a file on this machine ({detail}){beside}",
            file=name,
            hint=f"downloads need a cache that can be written; it is {repository.access.cache}, or what cache_dir says",
        )
    if isinstance(error, RuntimeError):
        return unreadable(
            f"can't get {name} from where {hub} stores its files ({detail})",
            "check the network, or try again later; with HF_HUB_DISABLE_XET=1 in the environment when Python starts, "
            "files come in the ordinary way instead of by hf_xet",
        )
    return unreadable(
        f"can't get {name} from {hub} ({detail})",
        f"check the network, and HF_ENDPOINT if a mirror is used; a folder on disk is given as ./{name}",
    )


def abort_hf_xet() -> None:
    """End what hf_xet fetches, as huggingface_hub does where Ctrl-C comes upon it in the thread that asked for it."""
    with contextlib.suppress(ImportError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]


def _response(error: BaseException | None) -> Any:
    """The answer that led to an error; None where there was none."""
    # That a file is not in the cache either is what huggingface_hub makes of a hub that fails.
    while error is not None and getattr(error, "response", None) is None:
        error = error.__cause__
    return getattr(error, "response", None)


def _elsewhere(response: Any, hub: str) -> str:
    """Whose answer it is, if not the hub's own."""
    parts = urlsplit(str(response.request.url)) if response is not None else urlsplit(hub)
    host = parts.netloc.rpartition("@")[2]
    return "" if host == urlsplit(hub).netloc else f"{parts.scheme}://{host}"
