"""Hooks: how a package takes part in every load without being a source.

A plugin names a module (or an object) in the entry-point group ``weightloaders.hooks`` and marks the functions it
implements with `hookimpl`. The hooks are those of `HookSpecs`. Plugins are imported once in a process, at the first
load or when somebody asks for what they register; one that fails is put aside with its error and disturbs no other.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from weightloaders.discovery import Plugin, broken, check_name, did_you_mean, imported, installed
from weightloaders.errors import BrokenPluginError, LoaderNameError, PlanError, WeightLoadersError, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from weightloaders.mapping.rules import Rule
    from weightloaders.plan import LoadPlan
    from weightloaders.report import LoadReport
    from weightloaders.transfer.engine import ProgressEvent

logger = logging.getLogger(__name__)

GROUP = "weightloaders.hooks"
_PROJECT = "weightloaders"

_hookspec = pluggy.HookspecMarker(_PROJECT)
hookimpl = pluggy.HookimplMarker(_PROJECT)
"""Marks a function of a plugin as the implementation of the hook of the same name."""


class Registrar:
    """What `HookSpecs.register_loaders` is given. What it collects counts once the hook has returned."""

    def __init__(self) -> None:
        self._loaders: dict[str, Callable[..., Any]] = {}
        self._closed = False

    def register(self, name: str, loader: Callable[..., Any]) -> None:
        """Offer a loader under a name.

        Args:
            name: Lower-case letters, digits, ``-``, ``_`` and ``.``.
            loader: A `BaseWeightLoader` subclass, or a function that returns one's instance.

        Raises:
            LoaderNameError: If the name is malformed or this plugin has used it already, or the hook is over.
        """
        if self._closed:
            raise LoaderNameError(f"{name!r} came too late: a registrar is valid only during register_loaders")
        if check_name(name) in self._loaders:
            raise LoaderNameError(f"the plugin registers two loaders named {name!r}")
        self._loaders[name] = loader

    def __bool__(self) -> bool:
        return bool(self._loaders)

    def close(self) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """Refuse further loaders, and return those that were registered."""
        self._closed = True
        return tuple(self._loaders.items())


class HookSpecs:
    """The hooks. A plugin implements those it needs, with as many of the arguments as it needs."""

    @_hookspec
    def register_loaders(self, registrar: Registrar) -> None:
        """Offer loaders whose names are not known before the plugin runs.

        A loader with a fixed name is better declared as an entry point of the group ``weightloaders.loaders``: then it
        is imported only when it is chosen. If this raises, none of the plugin's loaders is registered.

        Args:
            registrar: Takes ``register(name, loader)``.
        """

    @_hookspec
    def rules_for(self, model: torch.nn.Module) -> Any:
        """Return rules for a model, one or several (`Rename`, `Convert`, `Drop`, or as YAML has them), or None.

        They come last: they are for names that the caller's rules and the model's own declarations leave over, and that
        are not yet the model's. A model that fills itself by a ``load_weights`` of its own is not asked about. If this
        raises, the load stops before anything is touched.

        Args:
            model: The model that is about to be filled. It must not be changed.
        """

    @_hookspec
    def before_load(self, plan: LoadPlan) -> None:
        """Look at a plan before the first byte is read. Raise a `WeightLoadersError` to refuse the load.

        Args:
            plan: What is about to happen.
        """

    @_hookspec
    def on_progress(self, event: ProgressEvent) -> None:
        """Follow a load. May be called from any thread; a hook that raises is not called again during the load.

        Args:
            event: How far the load has come.
        """

    @_hookspec
    def after_load(self, report: LoadReport) -> None:
        """Look at what a load did. What this raises is logged; the load has succeeded.

        Args:
            report: What happened.
        """


@dataclass(frozen=True, slots=True)
class HookPlugin:
    """A hook plugin and how it fared.

    Attributes:
        plugin: Its name, target, distribution and version.
        status: ``"ok"``, ``"broken"`` or ``"disabled"`` (then it was not imported).
        error: What broke it.
        loaders: What it registered, as pairs of name and loader.
    """

    plugin: Plugin
    status: Literal["ok", "broken", "disabled"]
    error: str | None = None
    loaders: tuple[tuple[str, Callable[..., Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class _State:
    """All that is known of hook plugins; replaced as a whole, so that a failure on the way leaves no trace."""

    manager: pluggy.PluginManager
    plugins: tuple[HookPlugin, ...] = ()
    loaded: bool = False


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(_PROJECT)
    manager.add_hookspecs(HookSpecs)
    return manager


_state = _State(_new_manager())
_muted: set[str] = set()
_registrar: ContextVar[Registrar | None] = ContextVar("registrar", default=None)
# Re-entrant: a plugin that asks, while it is being imported, for what plugins offer gets what is known so far.
_lock = threading.RLock()
_loading = False


def load_plugins() -> tuple[HookPlugin, ...]:
    """Import the installed hook plugins, unless that was done before; what they are, sorted by name."""
    global _state, _loading
    with _lock:
        if not (_state.loaded or _loading):
            _loading = True
            try:
                manager = _new_manager()
                # pluggy calls those first that came last, so the last by name comes first.
                plugins = [_load(plugin, manager) for plugin in reversed(installed(GROUP))]
                _state = _State(manager, tuple(reversed(plugins)), loaded=True)
            finally:
                _loading = False
    return _state.plugins


def known_plugins() -> tuple[HookPlugin, ...]:
    """The hook plugins that were imported so far; imports none."""
    return _state.plugins


def has_plugins() -> bool:
    """Whether any hook plugin takes part in loads."""
    load_plugins()
    return bool(_state.manager.get_plugins())


def _load(plugin: Plugin, manager: pluggy.PluginManager) -> HookPlugin:
    if plugin.is_disabled():
        return HookPlugin(plugin, "disabled")
    registrar = Registrar()
    token = _registrar.set(registrar)
    try:
        target = imported(plugin)
        _register(plugin, target() if isinstance(target, type) else target, manager, registrar)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 -- one broken plugin never breaks another
        logger.warning("the hook plugin %r of %s is left out: %s", plugin.name, plugin.label, summary(error))
        told = error if isinstance(error, BrokenPluginError) else broken(plugin, "can't be registered", error)
        return HookPlugin(plugin, "broken", str(told))
    finally:
        _registrar.reset(token)
        loaders = registrar.close()
    return HookPlugin(plugin, "ok", loaders=loaders)


def active_registrar() -> Registrar | None:
    """The registrar of the plugin that is being imported right now, for what it registers in another way."""
    return _registrar.get()


def _register(plugin: Plugin, implementation: object, manager: pluggy.PluginManager, registrar: Registrar) -> None:
    name = _pluggy_name(plugin)
    try:
        manager.register(implementation, name)
        callers = manager.get_hookcallers(implementation) or []
        _check_hooks(callers, implementation)
        for impl in manager.hook.register_loaders.get_hookimpls():
            if impl.plugin is implementation:
                _call(impl, registrar=registrar)
        if not callers and not registrar:
            raise TypeError(f"{plugin.target} implements no hook; mark its functions with weightloaders.hookimpl")
    except BaseException:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise


def _pluggy_name(plugin: Plugin) -> str:
    return f"{plugin.label} ({plugin.name})"


def _check_hooks(callers: Iterable[pluggy.HookCaller], implementation: object) -> None:
    for caller in callers:
        if caller.spec is None:
            known = [name for name in vars(HookSpecs) if not name.startswith("_")]
            raise TypeError(f"there is no hook named {caller.name!r}{did_you_mean(caller.name, known)}")
        for impl in caller.get_hookimpls():
            if impl.plugin is implementation:
                if impl.hookwrapper or impl.wrapper:
                    raise TypeError(
                        f"{caller.name} is marked as a wrapper; each hook is called by itself, so none wraps another"
                    )
                _check_kind(impl, caller.name)


def _check_kind(impl: pluggy.HookImpl, name: str) -> None:
    # Calling one of these runs nothing of it, so that a refusal of a load, for one, would never come.
    if inspect.iscoroutinefunction(impl.function) or inspect.isasyncgenfunction(impl.function):
        raise TypeError(f"{name} is an `async` function, which nobody would wait for; write `def {name}`")
    if inspect.isgeneratorfunction(impl.function) and name != "rules_for":
        raise TypeError(f"{name} holds a `yield`, so that calling it does nothing")


def _call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
    # Called one by one rather than through pluggy, which would let the first that raises keep the others from running.
    return impl.function(*(arguments[name] for name in impl.argnames))


def _implementations(hook: str) -> list[pluggy.HookImpl]:
    load_plugins()
    # pluggy lists them last to first, e.g. those marked `tryfirst` at the end.
    caller: pluggy.HookCaller = getattr(_state.manager.hook, hook)
    return caller.get_hookimpls()[::-1]


def rules_for(model: torch.nn.Module) -> list[tuple[str, tuple[Rule, ...]]]:
    """The rules that plugins have for a model, as pairs of plugin and rules, without the empty ones.

    Raises:
        BrokenPluginError: If a plugin's hook fails.
        RuleError: If what it returns are no rules.
        WeightLoadersError: What a hook raised of that kind.
    """
    from weightloaders.mapping.parsing import parse_rules

    found = []
    for impl in _implementations("rules_for"):
        with _naming(impl):
            rules = parse_rules(_call(impl, model=model))
        if rules:
            found.append((impl.plugin_name, rules))
    return found


def before_load(plan: LoadPlan) -> None:
    """Show a plan to the plugins.

    Raises:
        WeightLoadersError: A plugin's veto.
        PlanError: If a plugin changed what the plan does.
        BrokenPluginError: If a plugin's hook fails in any other way.
    """
    _muted.clear()
    for impl in _implementations("before_load"):
        planned = _steps(plan)
        with _naming(impl), _asking():
            _call(impl, plan=plan)
            if _steps(plan) != planned:
                raise PlanError(
                    f"before_load of the hook plugin {impl.plugin_name} changed the steps of the plan, so that "
                    "what was checked is not what would be done",
                    hint="a hook may refuse a plan by raising; rules_for decides about names",
                )


def _steps(plan: LoadPlan) -> list[int]:
    return [id(step) for step in getattr(plan, "steps", ())]


def on_progress(event: ProgressEvent) -> None:
    """Tell the plugins how far a load has come. One that raises is logged, and left out until the next load."""
    for impl in _implementations("on_progress"):
        if impl.plugin_name not in _muted and not _succeeds(impl, event=event):
            _muted.add(impl.plugin_name)


def after_load(report: LoadReport) -> None:
    """Show a report to the plugins. What they raise is logged."""
    _muted.clear()
    with _asking():
        for impl in _implementations("after_load"):
            _succeeds(impl, report=report)


_is_asking: ContextVar[bool] = ContextVar("weightloaders_is_asking", default=False)


def is_before_or_after_load() -> bool:
    """Whether this code is a plugin's, called before or after a load, be it part of another load."""
    return _is_asking.get()


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    before = _is_asking.get()
    _is_asking.set(True)
    try:
        yield
    finally:
        _is_asking.set(before)


@contextlib.contextmanager
def _naming(impl: pluggy.HookImpl) -> Iterator[None]:
    """Let errors of ours pass, with the plugin's name on them; turn any other into a `BrokenPluginError`."""
    try:
        yield
    except WeightLoadersError as error:
        error.plugin = error.plugin or impl.plugin_name
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise broken(_plugin_of(impl), f"failed in {impl.function.__name__}", error) from error


def _succeeds(impl: pluggy.HookImpl, **arguments: Any) -> bool:
    """Call a hook that only watches; log what it raises."""
    try:
        _call(impl, **arguments)
    except KeyboardInterrupt:
        raise
    except BaseException:
        logger.exception("%s of the hook plugin %s failed", impl.function.__name__, impl.plugin_name)
        return False
    return True


def _plugin_of(impl: pluggy.HookImpl) -> Plugin:
    return next(p.plugin for p in _state.plugins if _pluggy_name(p.plugin) == impl.plugin_name)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Forget all hook plugins for the length of a block, so that they are looked for anew; for tests."""
    global _state
    with _lock:
        before, _state = _state, _State(_new_manager())
        _muted.clear()
    try:
        yield
    finally:
        with _lock:
            _state = before
