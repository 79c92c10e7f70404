"""`BaseWeightLoader`: what every loader is, built-in or third-party."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weightloaders.errors import SourceReadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch
    from pydantic import BaseModel

    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Weights


@dataclass(frozen=True, slots=True)
class Probe:
    """A loader's answer to "can you read this?", with the reason for people.

    Args:
        answer: ``"yes"`` (it is certainly mine), ``"maybe"`` (I could try) or ``"no"``.
        reason: Why, as a short phrase.
    """

    answer: Literal["no", "maybe", "yes"]
    reason: str = ""

    @classmethod
    def yes(cls, reason: str = "") -> Probe:
        """It is certainly this loader's."""
        return cls("yes", reason)

    @classmethod
    def maybe(cls, reason: str = "") -> Probe:
        """This loader could try."""
        return cls("maybe", reason)

    @classmethod
    def no(cls, reason: str = "") -> Probe:
        """This loader can't read it."""
        return cls("no", reason)


# What is said where nobody wrote a `probe`.
NOT_ASKED = "does not take part in automatic detection"


class BaseWeightLoader(ABC):
    """Describes what a source holds. Subclass it, write `get_weights`, register the class under a name.

    The constructor takes the loader's options as keyword arguments; without `Options` its signature is their schema.

    Attributes:
        description: One line for ``weightloaders list``.
        Options: A pydantic model of the constructor's keyword arguments, for what a signature can't say.
        requires: Modules that it works without only in part, or not at all, each with what pip installs for it, e.g.
            ``{"tensorizer": "weightloaders-engines[tensorizer]"}``: so that ``weightloaders list`` can tell.
        borrowed: The tensors from `get_weights` are views of a buffer that is reused; the core copies what it holds.
    """

    description: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel] | None] = None
    requires: ClassVar[Mapping[str, str]] = {}
    borrowed: ClassVar[bool] = False

    # The name that it was asked for by and the plugin that offers it, for reports and errors; None for an instance that
    # somebody made by hand.
    _created_as: tuple[str, str | None] | None = None

    @abstractmethod
    def get_weights(
        self, model_name_or_path: str
    ) -> Weights | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]:
        """Say what the source holds.

        Args:
            model_name_or_path: What the user named: a folder, a file, a repository id or an address.

        Returns:
            Best a `Weights` (see `Weights.describe`): then nothing is read here, everything is checked first and the
            engine reads in parallel. A dict of tensors, or an iterable of ``(name, tensor)`` pairs, will do too.
        """

    def load_weights(self, model: torch.nn.Module, weights: Any) -> object:
        """Fill a model with what `get_weights` returned. The default plans, checks and transfers.

        An override is allowed; which parameters it fills is watched. Calling ``super().load_weights(model, weights)``
        from one obeys the rules and policies of the load that it is part of.

        Args:
            model: The model to fill, in place.
            weights: What `get_weights` returned, or anything else that the contract accepts as weights.

        Returns:
            A `LoadReport`.

        Raises:
            PlanError: If something is missing or does not fit; nothing was touched then.
            LoadError: If reading failed on the way.
        """
        from weightloaders.loading import load_planned

        return load_planned(model, weights, borrowed=self.borrowed)

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:  # noqa: ARG002 -- for overrides
        """Say what files hold that lie anywhere: on a disk, in a bucket, behind an address.

        A format that can be read from byte sources alone is so read from wherever a `Listing` can be made. For files on
        disk that is a `FolderListing`.

        Args:
            listing: What lies in the folder.
            name: The one file, or index, in it that was named; empty for the folder itself.

        Raises:
            SourceError: If there are no weights, or a file is not what it should be; if only files on disk can be read.
        """
        raise SourceReadError(
            f"{listing.where} can't be read: {type(self).__name__} reads only files on disk",
            file=listing.where,
            hint="download the files, and name their folder",
        )

    def get_model_files(self, model_name_or_path: str, needed: str = "") -> Path | Listing | None:  # noqa: ARG002 -- for overrides
        """Where a model's config, tokenizer and the like lie, if this loader alone knows how to get at them.

        Args:
            model_name_or_path: What the user named.
            needed: The file, such as ``"config.json"``, without which the others are of no use.

        Returns:
            A folder on disk, or a listing of files elsewhere, of which the wanted ones are fetched. None for what is
            found without a loader: what lies in a folder, in a repository on the hub or at a web address.

        Raises:
            SourceError: If there is nothing of the kind, or it can't be read.
        """
        return None

    # `loading` asks for this mark to tell an override from the default without knowing this class.
    load_weights.is_default = True  # type: ignore[attr-defined]

    def _auto_match_and_load(self, model: torch.nn.Module, weights: Any) -> object:
        """Match names automatically (wrappers, prefixes, fused and tied parameters) and load.

        A documented name for the default `load_weights`, for overrides that want it back.
        """
        return BaseWeightLoader.load_weights(self, model, weights)

    def get_listed_model_files(self, listing: Listing, name: str = "", needed: str = "") -> Path | None:  # noqa: ARG002 -- for overrides
        """The folder with a model's config, tokenizer and the like, where the files of weights themselves hold these.

        Args:
            listing: What lies in the folder, as for `get_listed_weights`.
            name: The one file in it that was named; empty for the folder itself.
            needed: As for `get_model_files`.

        Returns:
            A folder on disk. None where the files of the format hold nothing of the kind.
        """
        return None

    @classmethod
    def probe(cls, path: str) -> Probe:  # noqa: ARG003 -- part of the contract
        """Say whether this loader can read a source, cheaply: names and a few bytes, no data.

        Args:
            path: What the user named.
        """
        return Probe.no(NOT_ASKED)

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> Probe:  # noqa: ARG003 -- part of the contract
        """Say whether this loader's `get_listed_weights` can read files, cheaply: names and a few bytes, no data.

        Args:
            listing: What lies in the folder.
            name: The one file, or index, in it that was named; empty for the folder itself.
        """
        return Probe.no("reads only files on disk")
