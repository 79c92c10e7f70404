"""`AutoLoader`: asks the loaders which of them can read a source, and uses that one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders.discovery import KNOWN_PACKAGES
from weightloaders.errors import BrokenPluginError, CheckpointFormatError, SourceNotFoundError, summary
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.loaders.options import LoaderFactory, create_loader
from weightloaders.weights.http import is_web_address, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from weightloaders.weights.weights import Stream, Weights

logger = logging.getLogger(__name__)


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
        maybe: list[tuple[Candidate, LoaderFactory, Probe]] = []
        reasons: dict[str, str] = {}
        for tier in (lambda: self._built_in, self._third_party):
            for candidate in sorted(tier(), key=lambda c: c.name):
                try:
                    loader = candidate.load()
                    answer = _probe(loader, model_name_or_path)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 -- one broken loader never hides another
                    logger.warning("the loader %r failed while it was asked: %s", candidate.name, summary(error))
                    reasons[candidate.name] = f"failed with {summary(error)}"
                    continue
                if answer.answer == "yes":
                    return self._create(candidate, loader, answer)
                if answer.answer == "maybe":
                    maybe.append((candidate, loader, answer))
                reasons[candidate.name] = answer.reason or answer.answer
        if maybe:
            return self._create(*maybe[0])
        raise _nobody(model_name_or_path, reasons)

    def _create(self, candidate: Candidate, loader: LoaderFactory, answer: Probe) -> BaseWeightLoader:
        logger.info("the loader %r was chosen automatically: %s", candidate.name, answer.reason or answer.answer)
        return create_loader(loader, self._options, name=candidate.name, plugin=candidate.plugin)

    def get_weights(self, model_name_or_path: str) -> Weights | Stream:
        """What the chosen loader says that the source holds. See `choose`."""
        from weightloaders.weights.weights import as_weights

        chosen = self.choose(model_name_or_path)
        return as_weights(chosen.get_weights(model_name_or_path), borrowed=chosen.borrowed)


def _probe(loader: LoaderFactory, path: str) -> Probe:
    probe = getattr(loader, "probe", None)
    if probe is None:
        return Probe.no("is a factory, which can't be asked")
    answer = probe(path)
    if not isinstance(answer, Probe) or answer.answer not in ("no", "maybe", "yes"):
        raise BrokenPluginError(f"its probe returned {answer!r}, not a Probe")
    return answer


def _nobody(path: str, reasons: Mapping[str, str]) -> SourceNotFoundError | CheckpointFormatError:
    # These two answer False for what can't be asked at all, where pathlib raises.
    is_file, exists = os.path.isfile(path), os.path.exists(path)  # noqa: PTH110, PTH113
    kinds = {path.partition("://")[0], Path(path).suffix.removeprefix(".").lower()} - set(reasons)
    packages = [KNOWN_PACKAGES[kind] for kind in sorted(kinds) if kind in KNOWN_PACKAGES]
    hint = f"pip install {packages[0]}" if packages else "name the loader that reads it, if there is one"
    details = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    if is_web_address(path):
        path = shown(path)
        return SourceNotFoundError(f"no loader recognises the address {path}:{details}", file=path, hint=hint)
    if is_file:
        return CheckpointFormatError(f"no loader recognises {path}:{details}", file=path, hint=hint)
    what = "no loader recognises what is in it" if exists else "there is no such file or folder"
    return SourceNotFoundError(f"no weights found at {path}: {what}{details}", file=path, hint=hint)
