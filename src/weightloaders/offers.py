"""Who offers which loader, and what a name means.

A name is looked for in this order, and the first place that has it decides:

1. loaders that this process registered itself,
2. the built-ins,
3. entry points of installed distributions (group ``weightloaders.loaders``), each imported only when it is chosen,
4. loaders that hook plugins register (`weightloaders.hooks.HookSpecs.register_loaders`).

So nothing that is installed can shadow a built-in, and what a name means does not depend on what was imported before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from weightloaders import __version__, hooks
from weightloaders.discovery import DISABLE_VARIABLE, KNOWN_PACKAGES, Plugin, broken, did_you_mean, imported, installed
from weightloaders.errors import (
    BrokenPluginError,
    LoaderConflictError,
    LoaderContractError,
    LoaderDisabledError,
    LoaderNameError,
    UnknownLoaderError,
)
from weightloaders.loaders.base import BaseWeightLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightloaders.loaders.options import LoaderFactory

GROUP = "weightloaders.loaders"
OWN_DISTRIBUTION = "weightloaders"

# The same as the entry points in pyproject.toml: a source tree or a frozen program has no metadata to read.
BUILT_IN = {
    "auto": "weightloaders.loaders.auto:AutoLoader",
    "binary": "weightloaders.loaders.binary:BinaryLoader",
    "dummy": "weightloaders.loaders.dummy:DummyLoader",
    "hf": "weightloaders.loaders.hf:HuggingFaceLoader",
    "http": "weightloaders.loaders.http:HttpLoader",
    "local": "weightloaders.loaders.local:LocalLoader",
    "torch": "weightloaders.loaders.torch:TorchLoader",
}

# What they say of themselves, so that listing them need not import them; a test holds the two equal.
DESCRIPTIONS = {
    "auto": "asks the others which of them can read the source",
    "binary": "meta.txt and model.bin: packed values with a list of names and shapes",
    "dummy": "seeded random values in the shapes that a transformers config implies",
    "hf": "Hugging Face folders and repositories on the hub",
    "http": "safetensors and .bin at an https address, read in parts",
    "local": "safetensors from a folder or file",
    "torch": "PyTorch's .bin, .pt and .pth, weights-only",
}

Origin = Literal["built-in", "entry point", "hook", "run time"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A loader that somebody offers under a name.

    Args:
        plugin: The name, and where it comes from.
        origin: What kind of place that is.
        loader: The loader itself, where it is in hand already.
    """

    plugin: Plugin
    origin: Origin
    loader: LoaderFactory | None = None

    @property
    def name(self) -> str:
        """The name."""
        return self.plugin.name

    @property
    def is_third_party(self) -> bool:
        """Whether it is installed and not ours."""
        return self.origin in ("entry point", "hook")

    @property
    def is_disabled(self) -> bool:
        """Whether ``WEIGHTLOADERS_DISABLE`` applies to it."""
        return self.plugin.is_disabled(built_in=self.origin == "built-in")

    @property
    def culprit(self) -> str | None:
        """The plugin to name in errors; None for what is ours or the program's own."""
        return self.plugin.label if self.is_third_party else None

    def load(self) -> LoaderFactory:
        """Import the loader, and see that it is one.

        Raises:
            BrokenPluginError: If it can't be imported, or looking at it runs code that fails.
            LoaderContractError: If it is no loader.
        """
        return checked(imported(self.plugin) if self.loader is None else self.loader, self.plugin)

    def __str__(self) -> str:
        owner = "the built-in" if self.origin == "built-in" else f"{self.plugin.label}'s"
        return f"{owner} {self.plugin.target}"


def checked(loader: Any, plugin: Plugin) -> LoaderFactory:
    """The loader itself, if it keeps the contract.

    Args:
        loader: What may be a loader.
        plugin: Where it comes from.

    Raises:
        BrokenPluginError: If looking at it runs code that fails, a metaclass's for one.
        LoaderContractError: If it is a class that is no loader or is abstract, or can't be called at all.
    """
    try:
        _check(loader, plugin.label if plugin.distribution else None)
        description_of(loader)
    except (LoaderContractError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise broken(plugin, "can't be looked at", error) from error
    factory: LoaderFactory = loader
    return factory


def _check(loader: Any, plugin: str | None) -> None:
    if isinstance(loader, type):
        if not issubclass(loader, BaseWeightLoader):
            raise LoaderContractError(
                f"{loader.__qualname__} is no loader: it does not derive from BaseWeightLoader",
                plugin=plugin,
                hint="derive it from weightloaders.BaseWeightLoader, or register a function that returns a loader",
            )
        if inspect.isabstract(loader):
            missing = ", ".join(sorted(loader.__abstractmethods__))
            raise LoaderContractError(f"the loader {loader.__qualname__} does not define {missing}", plugin=plugin)
    elif not callable(loader) or isinstance(loader, BaseWeightLoader):
        raise LoaderContractError(
            f"a loader is a class derived from BaseWeightLoader, or a factory of such loaders, not {loader!r}",
            plugin=plugin,
        )


def description_of(loader: LoaderFactory) -> str:
    """What a loader says of itself, for people; empty where it says nothing."""
    said = getattr(loader, "description", "")
    return said if isinstance(said, str) else ""


def lacking(loader: LoaderFactory) -> str | None:
    """Which of the modules that a loader requires are not installed, and what to do; None where nothing is lacking.

    None of them is imported.
    """
    requires: object = None
    with contextlib.suppress(Exception):  # whatever a class of somebody else's says when it is asked
        requires = loader.requires  # type: ignore[attr-defined]
    if not isinstance(requires, Mapping):
        return None
    absent = {str(module): str(package) for module, package in requires.items() if not _is_there(str(module))}
    if not absent:
        return None
    packages = " ".join(f"'{package}'" for package in absent.values())
    return f"not installed: {', '.join(absent)}; pip install {packages}"


def _is_there(module: str) -> bool:
    try:
        # Of a sub-module only the package: looking for it would import that.
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # it is no name, or was put there by hand
        return False


def target_of(loader: Any) -> str:
    """``"package.module:Class"`` for a class or a factory."""
    loader = loader.func if isinstance(loader, partial) else loader
    kind = loader if isinstance(loader, type) or inspect.isroutine(loader) else type(loader)
    try:
        return f"{kind.__module__}:{kind.__qualname__}"
    except Exception:  # noqa: BLE001 -- a metaclass may keep even the name to itself
        return f"{type(kind).__module__}:{type(kind).__qualname__}"


def given(loader: Any) -> Offer:
    """The offer for a class or a factory that was given itself rather than by a name. Raises as `checked` does."""
    target = target_of(loader)
    plugin = Plugin(_short_name(target), target)
    return Offer(plugin, "run time", checked(loader, plugin))


def name_of(loader: BaseWeightLoader) -> str:
    """How a loader is called: as it was asked for, or as the class that it is."""
    created_as = loader._created_as  # noqa: SLF001 -- what the registry wrote there
    return _short_name(target_of(type(loader))) if created_as is None else created_as[0]


def _short_name(target: str) -> str:
    built_in = next((name for name, other in BUILT_IN.items() if other == target), None)
    return built_in or target.replace(":", ".").rpartition(".")[2]


# ------------------------------------------------------------------ the places


def built_ins() -> list[Offer]:
    """The loaders of this package."""
    return [Offer(Plugin(n, t, OWN_DISTRIBUTION, __version__), "built-in") for n, t in BUILT_IN.items()]


def entry_points() -> list[Offer]:
    """What installed distributions declare; nothing is imported."""
    # Our own distribution declares the built-ins, which the table has already.
    return [Offer(p, "entry point") for p in installed(GROUP) if not p.comes_from(OWN_DISTRIBUTION)]


def from_hooks(*, load: bool) -> list[Offer]:
    """What hook plugins have registered.

    Args:
        load: Whether to import the plugins, if that was not done before.
    """
    return [
        Offer(Plugin(name, target_of(loader), hook.plugin.distribution, hook.plugin.version), "hook", loader)
        for hook in (hooks.load_plugins() if load else hooks.known_plugins())
        for name, loader in hook.loaders
    ]


def ranks(registered: Mapping[str, Offer]) -> list[Callable[[], list[Offer]]]:
    """The places in which a name is looked for, first place first; each is asked only if those before lack it."""
    return [lambda: list(registered.values()), built_ins, entry_points, partial(from_hooks, load=True)]


# ------------------------------------------------------------------ what a name means


def find(
    name: str, registered: Mapping[str, Offer], places: Iterable[Callable[[], list[Offer]]] | None = None
) -> Offer:
    """The one offer that a name means.

    Args:
        name: A loader's name, ``"distribution:name"`` or ``"package.module:Class"``.
        registered: What this process registered itself.
        places: Where it is looked for, if that was asked for already: all metadata is read to tell what is installed.

    Raises:
        UnknownLoaderError: If nobody has that name.
        LoaderConflictError: If two distributions offer it.
        LoaderDisabledError: If it is disabled.
        BrokenPluginError: If ``"package.module:Class"`` can't be imported.
    """
    if not isinstance(name, str):
        raise LoaderNameError(f"a loader is asked for by a name, not by {name!r}")
    distribution, colon, bare = name.rpartition(":")
    disabled: list[Offer] = []
    for rank in ranks(registered) if places is None else places:
        matching = [o for o in rank() if o.name == bare and (not colon or o.plugin.comes_from(distribution))]
        usable = [o for o in matching if not o.is_disabled]
        if len(usable) > 1:
            raise LoaderConflictError(conflict(usable), hint=way_out(usable))
        if usable:
            return usable[0]
        disabled += matching
    if disabled:
        raise _disabled(disabled[0])
    if name.count(":") == 1 and all(part.isidentifier() for part in name.replace(":", ".").split(".")):
        return _by_target(name)
    raise unknown(name, registered)


def _by_target(target: str) -> Offer:
    for offer in (*built_ins(), *entry_points()):
        if offer.plugin.target == target and offer.is_disabled:
            raise _disabled(offer)
    plugin = Plugin(target, target)
    try:
        return Offer(plugin, "run time", imported(plugin))
    except BrokenPluginError as error:
        cause = error.__cause__
        module = target.partition(":")[0]
        absent = isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}.")
        if absent or (isinstance(cause, AttributeError) and module in sys.modules):
            raise UnknownLoaderError(
                f"there is no loader {target!r}: {cause}",
                hint="it is read as 'package.module:Class', and the module must be importable in this process",
            ) from cause
        raise


def conflict(offers: Iterable[Offer]) -> str:
    """What is wrong where several distributions offer one name."""
    offers = list(offers)
    return f"several distributions offer a loader named {offers[0].name!r}: {', '.join(map(str, offers))}"


def way_out(offers: Iterable[Offer]) -> str:
    """What to do about a conflict."""
    choices = dict.fromkeys(f"'{o.plugin.distribution}:{o.name}'" for o in offers)
    return f"pick one as {' or '.join(choices)}, or disable or uninstall the other"


def unknown(name: str, registered: Mapping[str, Offer]) -> UnknownLoaderError:
    """The error for a name that nobody has: the nearest names, all names, plugins that failed, what to install."""
    available = names((*registered.values(), *built_ins(), *entry_points(), *from_hooks(load=False)))
    near = did_you_mean(name, available)
    message = f"no loader is named {name!r}{near} (available: {', '.join(available)})"
    for hook in hooks.known_plugins():
        if hook.status == "broken":
            message += f"\n  a plugin that might have brought it is broken: {hook.error}"
    package = KNOWN_PACKAGES.get(name, "")
    called = [offer.name for offer in entry_points() if offer.plugin.comes_from(package)]
    elsewhere = (
        "install the package that brings it; or, where another process registered it, which this one does not know, "
        "name it as 'package.module:Class', or declare it as an entry point"
    )
    if called:
        return UnknownLoaderError(message, hint=f"{package} is installed; its loader is called {called[0]!r}")
    return UnknownLoaderError(message, hint=f"pip install {package}" if package else None if near else elsewhere)


def names(offers: Iterable[Offer]) -> list[str]:
    """The names that can be asked for, sorted."""
    return sorted({o.name for o in offers if o.plugin.problem is None and not o.is_disabled})


def _disabled(offer: Offer) -> LoaderDisabledError:
    return LoaderDisabledError(
        f"the loader {offer.name!r} ({offer}) is disabled",
        plugin=offer.culprit,
        hint=f"take it out of the environment variable {DISABLE_VARIABLE}",
    )
