"""`AutoLoader`: asks the loaders which of them can read a source, and uses that one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders.discovery import KNOWN_PACKAGES, did_you_mean
from weightloaders.errors import (
    BrokenPluginError,
    CheckpointFormatError,
    OptionsError,
    SourceError,
    SourceNotFoundError,
    summary,
)
from weightloaders.loaders.base import NOT_ASKED, BaseWeightLoader, Probe
from weightloaders.loaders.options import LoaderFactory, create_loader
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import ADAPTER_FILE, ADAPTER_HINT, reader_of, suffix_of
from weightloaders.weights.folder import A_FOLDER, NOT_THERE, kind_of
from weightloaders.weights.http import is_web_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Stream, Weights

logger = logging.getLogger(__name__)

_NO_WAY = "name the loader that reads it, if there is one"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loader that may be chosen.

    Args:
        name: Its name.
        load: Imports it. May raise anything.
        plugin: Who offers it, for messages.
    """

    name: str
    load: Callable[[], LoaderFactory]
    plugin: str | None = None


class AutoLoader(BaseWeightLoader):
    """Asks every loader's `probe`, and passes its options on to the one that is chosen.

    Built-in loaders are asked first; others are imported and asked only if none of these says yes. Where several say
    yes, or nobody does and several say maybe, the first by name is taken, built-ins before others. A loader that fails
    while it is asked is passed over, and named in the error if nobody is found.

    Args:
        built_in: The built-in candidates.
        third_party: Called for the other candidates when they are needed.
        options: Options of the loader that will be chosen; validated then.
    """

    description = "asks the others which of them can read the source"

    def __init__(
        self,
        built_in: Iterable[Candidate],
        third_party: Callable[[], Iterable[Candidate]],
        options: Mapping[str, Any],
    ) -> None:
        self._built_in = tuple(built_in)
        self._third_party = third_party
        self._options = dict(options)

    def choose(self, model_name_or_path: str) -> BaseWeightLoader:
        """The loader for a source, created with the options.

        Raises:
            SourceNotFoundError: If nobody recognises it, and it does not exist or is a folder.
            CheckpointFormatError: If it is a file that nobody recognises.
            OptionsError: If the loader that is chosen does not take the options.
        """
        chosen, reasons, troubled = self._choose(lambda loader: _probe(loader, "probe", model_name_or_path))
        if chosen is None:
            raise _nobody(model_name_or_path, reasons, troubled)
        return chosen

    def choose_for(self, listing: Listing, name: str = "") -> BaseWeightLoader:
        """The loader for files wherever they lie, created with the options; see `get_listed_weights`.

        Raises:
            CheckpointFormatError: If nobody recognises them.
            OptionsError: If the loader that is chosen does not take the options.
        """
        chosen, reasons, _ = self._choose(lambda loader: _probe(loader, "probe_listing", listing, name))
        if chosen is None:
            raise _nobody_here(listing, name, reasons)
        return chosen

    def _choose(
        self, ask: Callable[[LoaderFactory], Probe]
    ) -> tuple[BaseWeightLoader | None, dict[str, str], Collection[str]]:
        """The loader that gives the best answer, if there is one; why the others don't, and which of them failed."""
        maybe: list[tuple[Candidate, LoaderFactory, Probe]] = []
        reasons: dict[str, str] = {}
        troubles: dict[str, str] = {}
        for tier in (lambda: self._built_in, self._third_party):
            for candidate in sorted(tier(), key=lambda c: c.name):
                try:
                    loader = candidate.load()
                    answer = ask(loader)
                except KeyboardInterrupt:
                    raise
                except SourceError as error:
                    # It could not look: the source is at fault.
                    troubles[candidate.name] = error.message
                    continue
                except BaseException as error:  # noqa: BLE001 -- one broken loader never hides another
                    logger.warning("the loader %r failed while it was asked: %s", candidate.name, summary(error))
                    troubles[candidate.name] = f"failed with {summary(error)}"
                    continue
                if answer.answer == "yes":
                    return self._create(candidate, loader, answer), {}, ()
                if answer.answer == "maybe":
                    maybe.append((candidate, loader, answer))
                reasons[candidate.name] = answer.reason or answer.answer
        return self._create(*maybe[0]) if maybe else None, {**troubles, **reasons}, troubles

    def _create(self, candidate: Candidate, loader: LoaderFactory, answer: Probe) -> BaseWeightLoader:
        logger.info("the loader %r was chosen automatically: %s", candidate.name, answer.reason or answer.answer)
        try:
            return create_loader(loader, self._options, name=candidate.name, plugin=candidate.plugin)
        except OptionsError as error:
            error.hint = error.hint or f"{candidate.name!r} was chosen automatically: name the loader that takes these"
            raise

    def get_weights(self, model_name_or_path: str) -> Weights | Stream:
        """What the chosen loader says that the source holds. See `choose`."""
        from weightloaders.weights.weights import as_weights

        chosen = self.choose(model_name_or_path)
        return as_weights(chosen.get_weights(model_name_or_path), borrowed=chosen.borrowed)

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:
        """What the chosen loader says that the files hold. See `choose_for`."""
        return self.choose_for(listing, name).get_listed_weights(listing, name)

    def get_listed_model_files(self, listing: Listing, name: str = "", needed: str = "") -> Path | None:
        """What the chosen loader says of them. See `choose_for`."""
        return self.choose_for(listing, name).get_listed_model_files(listing, name, needed)


def _probe(loader: LoaderFactory, method: str, *asked: object) -> Probe:
    probe = getattr(loader, method, None)
    if probe is None:
        return Probe.no("is a factory, which can't be asked")
    answer = probe(*asked)
    if not isinstance(answer, Probe) or answer.answer not in ("no", "maybe", "yes"):
        raise BrokenPluginError(f"its probe returned {answer!r}, not a Probe")
    return answer


def _nobody(
    path: str, reasons: Mapping[str, str], troubled: Collection[str]
) -> SourceNotFoundError | CheckpointFormatError:
    kind = kind_of(Path(path))
    exists = kind != NOT_THERE
    hint, details = _way_out([path.partition("://")[0], path, *_names_in(path)], reasons), _details(reasons)
    if shown(path) != path:
        # Some say it as the path that it would be.
        for name in (path, str(Path(path))):
            details = details.replace(name, shown(path))
    if is_web_address(path):
        path = shown(path)
        return SourceNotFoundError(f"no loader recognises the address {path}:{details}", file=path, hint=hint)
    if kind is None:
        return CheckpointFormatError(f"no loader recognises {path}:{details}", file=path, hint=hint)
    what = "no loader recognises what is in it" if kind == A_FOLDER else f"it {kind}"
    if not exists:
        what = f"there is no such file or folder{_nearest(path)}"
    if not exists and "://" not in path:
        # That is what each of them says, in words of its own.
        logger.debug("what the loaders say of %s:%s", path, details)
        others = ", ".join(name for name in reasons if name not in troubled)
        details = _details({name: reasons[name] for name in troubled}) + f"\n  asked in vain: {others}" * bool(others)
        if hint == _NO_WAY:
            hint = "check the path; the working directory is " + os.getcwd()  # noqa: PTH109 -- a text is wanted
    if kind == A_FOLDER and kind_of(Path(path) / ADAPTER_FILE) is None:
        what = "it holds an adapter (LoRA or the like), which is no model by itself"
        hint = ADAPTER_HINT
    return SourceNotFoundError(f"no weights found at {shown(path)}: {what}{details}", file=shown(path), hint=hint)


def _nobody_here(
    listing: Listing, name: str, reasons: Mapping[str, str]
) -> SourceNotFoundError | CheckpointFormatError:
    hint, details = _way_out([name] if name else sorted(listing.names), reasons), _details(reasons)
    where = f"{listing.where}/{name}" if name else listing.where
    if name:
        return CheckpointFormatError(f"no loader recognises {where}:{details}", file=where, hint=hint)
    subfolders = listing.subfolders_with_weights()
    if subfolders:
        hint = f"weights lie in the sub-folder {' or '.join(subfolders)}: give that one"
    what = "no loader recognises what is in it" if listing.names else "there is no file in it"
    return SourceNotFoundError(f"no weights found at {where}: {what}{details}", file=where, hint=hint)


def _way_out(names: Iterable[str], reasons: Mapping[str, str]) -> str:
    """What to install for names that end, or are, like a format's; else what else might help."""
    kinds = [reader_of(name) or suffix_of(name).removeprefix(".") or name for name in names]
    packages = [KNOWN_PACKAGES[kind] for kind in kinds if kind in KNOWN_PACKAGES and kind not in reasons]
    return f"pip install {packages[0]}" if packages else _NO_WAY


def _names_in(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 -- names are all that is needed
    except (OSError, ValueError):
        return []


def _nearest(path: str) -> str:
    """What lies there under a name like this."""
    folder, name = os.path.split(path)
    return did_you_mean(name, _names_in(folder or "."))


def _details(reasons: Mapping[str, str]) -> str:
    """A line for each reason, with all who give it; that somebody was not asked comes last."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items(), key=lambda item: item[1] == NOT_ASKED):
        by_reason.setdefault(reason, []).append(name)
    return "".join(f"\n  {', '.join(names)}: {reason}" for reason, names in by_reason.items())
