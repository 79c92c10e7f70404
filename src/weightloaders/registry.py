"""`WeightLoaderRegistry`: names become loaders, and loaders become known.

Which place a name is looked for in, and in which order, is told in `weightloaders.offers`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from weightloaders import offers
from weightloaders.discovery import DISABLE_VARIABLE, Plugin, canonical, check_name
from weightloaders.errors import LoaderNameError, OptionsError, RegistryError, UnknownLoaderError
from weightloaders.hooks import active_registrar, load_plugins
from weightloaders.loaders.auto import AutoLoader, Candidate
from weightloaders.loaders.base import BaseWeightLoader
from weightloaders.loaders.options import LoaderFactory, create_loader
from weightloaders.offers import Offer, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Status = Literal["ok", "incomplete", "broken", "conflict", "disabled"]


@dataclass(frozen=True, slots=True)
class LoaderDescription:
    """One loader, or one hook plugin that might have brought loaders but is broken or disabled.

    Attributes:
        name: How it is asked for.
        origin: ``"built-in"``, ``"entry point"``, ``"hook"`` or ``"run time"``.
        distribution: The installed distribution that offers it; None at run time.
        version: Its version.
        target: ``"package.module:Class"``.
        status: ``"ok"``, ``"incomplete"`` (what it requires is not installed), ``"broken"``, ``"conflict"`` (the name
            means another loader, or none clearly) or ``"disabled"``.
        error: Why it is not ok.
        description: What it says of itself in one line.
    """

    name: str
    origin: Origin
    distribution: str | None
    version: str | None
    target: str
    status: Status
    error: str | None = None
    description: str = ""


class WeightLoaderRegistry:
    """The loaders by name: one registry for the process, used through the class.

    Wherever a name is asked for, ``"distribution:name"`` picks one distribution's loader, and
    ``"package.module:Class"`` imports one that nobody has registered.
    """

    # Replaced as a whole under the lock, so that whoever reads it sees one state or the other.
    _registered: ClassVar[Mapping[str, Offer]] = MappingProxyType({})
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register(cls, name: str, loader: LoaderFactory, *, replace: bool = False) -> None:
        """Register a loader in this process. Registering the same one again changes nothing.

        Args:
            name: Lower-case letters, digits, ``-``, ``_`` and ``.``.
            loader: A `BaseWeightLoader` subclass, or a factory: any callable that returns an instance of one.
            replace: Whether the name may be taken already, even by a built-in.

        Raises:
            LoaderNameError: If the name is malformed, or taken by another loader.
            LoaderContractError: If it is no loader, or a class that lacks ``get_weights``.
        """
        registrar = active_registrar()
        if registrar is not None:
            # A hook plugin that calls this answers for it like for all else: kept if it comes up, else taken back.
            registrar.register(name, offers.given(loader).load())
            return
        target = offers.given(loader).plugin.target
        offer = Offer(Plugin(check_name(name), target), "run time", loader)
        # A module that registers what its own entry point declares says the same thing twice.
        elsewhere = [
            other
            for other in (*offers.built_ins(), *offers.entry_points())
            if other.name == name and other.plugin.target != target and not other.is_disabled
        ]
        with cls._lock:
            here = cls._registered.get(name)
            if here is not None and here.loader is loader:
                return
            taken = [here] if here else elsewhere
            if taken and not replace:
                raise LoaderNameError(
                    f"the name {name!r} is taken by {taken[0]}",
                    hint="choose another name, or insist with register(..., replace=True)",
                )
            cls._registered = MappingProxyType({**cls._registered, name: offer})

    @classmethod
    def unregister(cls, name: str) -> None:
        """Take back what `register` did. A built-in or installed loader that it had replaced is there again.

        Raises:
            UnknownLoaderError: If this process has not registered that name.
        """
        with cls._lock:
            if name not in cls._registered:
                raise UnknownLoaderError(
                    f"no loader named {name!r} was registered in this process",
                    hint=f"a built-in or installed loader is switched off with {DISABLE_VARIABLE}={name}",
                )
            cls._registered = MappingProxyType({n: o for n, o in cls._registered.items() if n != name})

    @classmethod
    def get(cls, name: str) -> type[BaseWeightLoader] | LoaderFactory:
        """The loader class of a name, imported if need be. For a factory: what was registered.

        Raises:
            UnknownLoaderError: If nobody has that name.
            LoaderConflictError: If two distributions offer it.
            LoaderDisabledError: If it is disabled.
            BrokenPluginError: If it can't be imported.
            LoaderContractError: If what it names is no loader.
        """
        return offers.find(name, cls._registered).load()

    @classmethod
    def create(cls, name: str, /, **kwargs: Any) -> BaseWeightLoader:
        """Create a loader by name.

        Args:
            name: As for `get`.
            **kwargs: The loader's options; checked before it is created.

        Raises:
            OptionsError: If an option is unknown, missing or ill-typed.
            RegistryError: See `get`.
        """
        return cls.resolve(name, kwargs)

    @classmethod
    def resolve(
        cls, loader: object, kwargs: Mapping[str, Any] | None = None, *, source: str | None = None
    ) -> BaseWeightLoader:
        """A loader from whatever users may give for one.

        Args:
            loader: A name, ``"distribution:name"``, ``"package.module:Class"``, a class, a factory or an instance.
            kwargs: Options for it; none go with an instance.
            source: What will be read. Given that, ``"auto"`` becomes the loader that it chooses.

        Raises:
            OptionsError: If the options don't suit the loader.
            RegistryError: See `get`.
            SourceError: If ``"auto"`` finds nobody who recognises the source.
        """
        if isinstance(loader, BaseWeightLoader):
            if kwargs:
                raise OptionsError(
                    f"the loader is an instance of {type(loader).__name__} already, so it takes no options: "
                    f"{', '.join(map(str, kwargs))}",
                    hint="give them to its constructor, or give the class or its name here",
                )
            created = loader
        elif isinstance(loader, str):
            offer = offers.find(loader, cls._registered)
            created = cls._create(offer.load(), kwargs or {}, loader, offer.culprit)
        else:
            offer = offers.given(loader)
            created = cls._create(offer.load(), kwargs or {}, offer.name, None)
        return created.choose(source) if isinstance(created, AutoLoader) and source is not None else created

    @classmethod
    def list_available(cls, *, hooks: bool = False) -> list[str]:
        """The names that can be asked for, sorted. Imports no loader.

        Args:
            hooks: Whether to import the hook plugins, for the names that only they know.
        """
        registered = cls._registered.values()
        return offers.names((*registered, *offers.built_ins(), *offers.entry_points(), *offers.from_hooks(load=hooks)))

    @overload
    @classmethod
    def describe(cls, name: None = None) -> list[LoaderDescription]: ...

    @overload
    @classmethod
    def describe(cls, name: str) -> LoaderDescription: ...

    @classmethod
    def describe(cls, name: str | None = None) -> list[LoaderDescription] | LoaderDescription:
        """What there is, who offers it and in which state it is.

        To tell whether they work, this imports the loaders of third parties and the hook plugins (with a name: only
        what that name needs). Built-ins are taken to work.

        Args:
            name: Only this one, or ``"distribution:name"``.

        Raises:
            UnknownLoaderError: If nothing has that name.
        """
        ranks = offers.ranks(cls._registered)
        if name is None:
            found = [*_described(ranks), *_failed_hooks()]
            return sorted(found, key=lambda description: (description.name, description.distribution or ""))
        distribution, _, bare = name.rpartition(":")
        for places in (ranks[:-1], ranks):
            for description in _described(places, only=bare):
                if not distribution or canonical(description.distribution or "") == canonical(distribution):
                    return description
        for description in _failed_hooks():
            if description.name == bare:
                return description
        raise offers.unknown(name, cls._registered)

    @classmethod
    @contextlib.contextmanager
    def isolated(cls) -> Iterator[None]:
        """Undo, at the end of a block, what was registered and unregistered in it; for tests."""
        before = cls._registered
        try:
            yield
        finally:
            with cls._lock:
                cls._registered = before

    @classmethod
    def _create(
        cls, loader: LoaderFactory, options: Mapping[str, Any], name: str, plugin: str | None
    ) -> BaseWeightLoader:
        if loader is not AutoLoader:
            return create_loader(loader, options, name=name, plugin=plugin)
        built_in = [offer for offer in offers.built_ins() if offer.name != "auto"]
        return AutoLoader(cls._candidates(built_in), cls._third_party_candidates, options)

    @classmethod
    def _third_party_candidates(cls) -> list[Candidate]:
        registered = cls._registered.values()
        return cls._candidates([*registered, *offers.entry_points(), *offers.from_hooks(load=True)])

    @classmethod
    def _candidates(cls, among: Iterable[Offer]) -> list[Candidate]:
        """Those whose names mean them; the others are disabled, replaced or in conflict."""
        candidates = []
        registered = cls._registered
        places = [functools.cache(place) for place in offers.ranks(registered)]
        for offer in among:
            with contextlib.suppress(RegistryError):
                if offers.find(offer.name, registered, places) == offer:
                    candidates.append(Candidate(offer.name, offer.load, offer.culprit))
        return candidates


def _described(ranks: Iterable[Callable[[], list[Offer]]], only: str | None = None) -> Iterator[LoaderDescription]:
    taken: dict[str, Offer] = {}
    for rank in ranks:
        by_name: dict[str, list[Offer]] = {}
        disabled: list[Offer] = []
        for offer in rank():
            if only in (None, offer.name):
                (disabled if offer.is_disabled else by_name.setdefault(offer.name, [])).append(offer)
        for name, rivals in by_name.items():
            for offer in rivals:
                if name in taken:
                    yield _description(offer, "conflict", f"not used: {name!r} means {taken[name]}")
                elif len(rivals) > 1:
                    yield _description(offer, "conflict", f"{offers.conflict(rivals)}; {offers.way_out(rivals)}")
                else:
                    yield _tried(offer)
            taken.setdefault(name, rivals[0])
        yield from (_description(offer, "disabled", f"disabled by {DISABLE_VARIABLE}") for offer in disabled)


def _tried(offer: Offer) -> LoaderDescription:
    if offer.origin == "built-in":
        return _description(offer, "ok", description=offers.DESCRIPTIONS[offer.name])
    try:
        loader = offer.load()
    except RegistryError as error:
        return _description(offer, "broken", str(error))
    lacks = offers.lacking(loader)
    return _description(offer, "incomplete" if lacks else "ok", lacks, offers.description_of(loader))


def _failed_hooks() -> list[LoaderDescription]:
    return [
        _description(Offer(hook.plugin, "hook"), hook.status, hook.error or f"disabled by {DISABLE_VARIABLE}")
        for hook in load_plugins()
        if hook.status != "ok"
    ]


def _description(offer: Offer, status: Status, error: str | None = None, description: str = "") -> LoaderDescription:
    plugin = offer.plugin
    return LoaderDescription(
        plugin.name, offer.origin, plugin.distribution, plugin.version, plugin.target, status, error, description
    )
