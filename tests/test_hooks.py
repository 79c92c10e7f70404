"""Hook plugins: found, imported once, called in turn, and put aside when they fail."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

import weightloaders
from weightloaders import hooks
from weightloaders.errors import (
    BrokenPluginError,
    LoaderContractError,
    LoaderNameError,
    PlanError,
    RuleError,
    UnknownLoaderError,
)
from weightloaders.mapping.rules import Drop, Rename
from weightloaders.testing import fake_distribution, isolated_registry

GROUP = "weightloaders.hooks"


@pytest.fixture
def install(tmp_path):
    """Install hook plugins by the source of their module; the name is the distribution's and the module's."""
    with ExitStack() as stack:
        stack.enter_context(hooks.isolated())

        def add(name, source, *, target=None, group=GROUP):
            source = "from weightloaders import hookimpl\ncalls = []\n" + source
            stack.enter_context(
                fake_distribution(tmp_path, name, entry_points={group: {name: target or name}}, modules={name: source})
            )

        yield add


def module(name):
    return sys.modules[name]


def status(name):
    return next((p.status, p.error) for p in hooks.load_plugins() if p.plugin.name == name)


WATCHER = """
@hookimpl
def before_load(plan): calls.append(("before", plan))
@hookimpl
def on_progress(event): calls.append(("progress", event))
@hookimpl
def after_load(report): calls.append(("after", report))
@hookimpl
def rules_for(model): return {'drop': [model]}
"""


def test_without_plugins_nothing_happens(install):
    assert hooks.load_plugins() == ()
    assert not hooks.has_plugins()
    assert hooks.rules_for(object()) == []
    hooks.before_load("plan")
    hooks.on_progress("event")
    hooks.after_load("report")


def test_a_plugin_sees_a_load_from_beginning_to_end(install):
    install("watcher", WATCHER)
    assert hooks.has_plugins()
    hooks.before_load("plan")
    hooks.on_progress("event")
    hooks.after_load("report")
    assert module("watcher").calls == [("before", "plan"), ("progress", "event"), ("after", "report")]
    assert hooks.rules_for("model") == [("watcher 1.0 (watcher)", (Drop("model"),))]


def test_knowing_the_plugins_imports_none(install):
    install("watcher", WATCHER)
    assert hooks.known_plugins() == ()
    assert "watcher" not in sys.modules


ONCE = """
import time, weightloaders
weightloaders.counted = getattr(weightloaders, 'counted', 0) + 1
time.sleep(0.05)
@hookimpl
def register_loaders(registrar):
    calls.append(1)
    registrar.register('once', lambda: None)
"""


def test_a_plugin_is_imported_and_asked_to_register_once_by_however_many_threads(install):
    install("once", ONCE)
    found = []
    threads = [threading.Thread(target=lambda: found.append(hooks.load_plugins())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weightloaders.__dict__.pop("counted") == 1
    assert module("once").calls == [1]
    assert [[p.status for p in plugins] for plugins in found] == [["ok"]] * 4


def test_a_plugin_may_be_an_object_or_a_class(install):
    body = "class Plugin:\n    @hookimpl\n    def rules_for(self, model): return {'drop': 'x'} if model == 1 else []\n"
    install("classy", body, target="classy:Plugin")
    install("objective", body + "plugin = Plugin()\n", target="objective:plugin")
    assert [name for name, _ in hooks.rules_for(1)] == ["classy 1.0 (classy)", "objective 1.0 (objective)"]
    assert hooks.rules_for(2) == []


def test_plugins_are_called_by_name_unless_they_ask_to_be_first(install):
    for name in ("b", "c", "a"):
        install(f"hook_{name}", f"@hookimpl\ndef rules_for(model): return {{'drop': '{name}'}}\n")
    install("hook_z", "@hookimpl(tryfirst=True)\ndef rules_for(): return {'drop': 'z'}\n")
    assert [rule.pattern for _, (rule,) in hooks.rules_for(object())] == ["z", "a", "b", "c"]


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ("return Drop('a')", (Drop("a"),)),
        ("return Drop('a'), Rename('a', 'b')", (Drop("a"), Rename("a", "b"))),
        ("yield Drop('a')\n    yield Drop('b')", (Drop("a"), Drop("b"))),
        ("return {'rename': {'a': 'b'}}", (Rename("a", "b"),)),
        ("return 'drop: [a]'", (Drop("a"),)),
        ("return []", None),
        ("pass", None),
    ],
)
def test_rules_come_one_or_several_or_not_at_all(install, body, rules):
    install("ruler", f"from weightloaders import Drop, Rename\n@hookimpl\ndef rules_for(model):\n    {body}\n")
    assert [found for _, found in hooks.rules_for(object())] == ([rules] if rules else [])


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("return 5", RuleError, "these are no rules: 5"),
        ("return [5]", RuleError, "this is no rule: 5"),
        ("return {'renam': {'a': 'b'}}", RuleError, "rules have no key 'renam'"),
        ("yield {}['absent']", BrokenPluginError, "failed in rules_for: KeyError"),
        ("raise type('Boom', (BaseException,), {})", BrokenPluginError, "failed in rules_for: Boom"),
    ],
)
def test_what_a_plugin_gives_for_rules_that_are_none_is_refused_in_its_name(install, body, error, said):
    install("ruler", f"@hookimpl\ndef rules_for(model):\n    {body}\n")
    with pytest.raises(error, match=re.escape(said)) as caught:
        hooks.rules_for(object())
    assert "ruler 1.0" in caught.value.plugin
    assert "ruler 1.0" in str(caught.value)


BREAKAGES = {
    "missing": ("import not_installed_anywhere", "install 'not_installed_anywhere'"),
    "exit": ("raise SystemExit(1)", "SystemExit: 1"),
    "its own kind": ("class Boom(BaseException): pass\nraise Boom('bang')", "Boom: bang"),
    "late exit": (WATCHER + "raise SystemExit(1)", "SystemExit: 1"),
    "registering": (
        WATCHER + "@hookimpl\ndef register_loaders(registrar): registrar.register('x', 1); 1/0",
        "division",
    ),
    "exit registering": (WATCHER + "@hookimpl\ndef register_loaders(registrar): raise SystemExit", "SystemExit"),
    "unknown hook": (WATCHER + "@hookimpl\ndef rule_for(model): pass", "did you mean 'rules_for'"),
    "unknown argument": (WATCHER + "@hookimpl\ndef register_loaders(registry): pass", "registry"),
    "no hook": ("def rules_for(model): pass", "implements no hook"),
    "wrapper": (WATCHER + "@hookimpl(wrapper=True)\ndef register_loaders(registrar): yield", "wrapper"),
    "name": (WATCHER + "@hookimpl\ndef register_loaders(registrar): registrar.register('No Name', 1)", "'No Name'"),
    "twice": (
        WATCHER + "@hookimpl\ndef register_loaders(registrar):\n    for _ in 1, 2: registrar.register('x', 1)",
        "two loaders named 'x'",
    ),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_plugin_is_rolled_back_and_disturbs_no_other(install, kind):
    source, complaint = BREAKAGES[kind]
    install("a_bad", source)
    install("watcher", WATCHER)
    found, error = status("a_bad")
    assert found == "broken"
    assert complaint in error
    assert "'a_bad' of a_bad 1.0" in error
    assert status("watcher") == ("ok", None)
    assert [p.loaders for p in hooks.load_plugins()] == [(), ()]
    assert [name for name, _ in hooks.rules_for("x")] == ["watcher 1.0 (watcher)"]
    hooks.before_load("plan")
    assert module("watcher").calls == [("before", "plan")]
    assert "a_bad" not in sys.modules or module("a_bad").calls == []


BY_THE_REGISTRY = """
from weightloaders import BaseWeightLoader, WeightLoaderRegistry
class Loader(BaseWeightLoader):
    def get_weights(self, path): return {}
WeightLoaderRegistry.register("direct", Loader, replace=True)
WeightLoaderRegistry.register("local", Loader, replace=True)
"""


def test_what_a_plugin_registers_past_its_registrar_is_its_own_and_shadows_no_built_in(install):
    install("direct", BY_THE_REGISTRY)
    with isolated_registry() as registry:
        assert registry.get("local").__module__ == "weightloaders.loaders.local"
        description = registry.describe("direct")
        assert (description.origin, description.distribution, description.status) == ("hook", "direct", "ok")


def test_what_a_broken_plugin_registered_past_its_registrar_is_taken_back(install):
    install("direct_bad", BY_THE_REGISTRY + "raise SystemExit")
    with isolated_registry() as registry:
        with pytest.raises(UnknownLoaderError, match="direct_bad"):
            registry.get("direct")
        assert "direct" not in registry.list_available(hooks=True)


def test_what_a_plugin_registers_that_is_no_loader_is_listed_as_broken(install):
    install("odd", "@hookimpl\ndef register_loaders(registrar): registrar.register('odd-one', 3)")
    with isolated_registry() as registry:
        assert registry.describe("odd-one").status == "broken"
        with pytest.raises(LoaderContractError, match=r"not 3") as caught:
            registry.create("odd-one")
        assert caught.value.plugin == "odd 1.0"


def test_an_interrupt_while_a_plugin_is_imported_passes_and_leaves_things_as_before(install):
    install("stopping", "import weightloaders.hooks\nraise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        hooks.load_plugins()
    assert hooks.known_plugins() == ()
    with pytest.raises(KeyboardInterrupt):
        hooks.load_plugins()


def test_one_module_under_two_names_takes_part_once(install, tmp_path):
    install("watcher", WATCHER)
    with fake_distribution(tmp_path, "again", entry_points={GROUP: {"again": "watcher"}}):
        hooks.before_load("plan")
        assert {p.plugin.name: p.status for p in hooks.load_plugins()} == {"again": "broken", "watcher": "ok"}
        assert module("watcher").calls == [("before", "plan")]


def test_a_plugin_that_asks_for_plugins_while_it_is_imported_gets_what_is_known(install):
    install("curious", "from weightloaders import hooks\nfound = hooks.load_plugins()\n" + WATCHER)
    assert status("curious") == ("ok", None)
    assert module("curious").found == ()


@pytest.mark.parametrize("listed", ["watcher", "*", "other, Watcher"])
def test_a_disabled_plugin_is_never_imported(install, monkeypatch, listed):
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", listed)
    install("watcher", WATCHER)
    assert status("watcher") == ("disabled", None)
    assert "watcher" not in sys.modules
    assert not hooks.has_plugins()


def test_a_registrar_is_of_no_use_afterwards(install):
    install("keeper", "@hookimpl\ndef register_loaders(registrar): calls.append(registrar)\n")
    hooks.load_plugins()
    with pytest.raises(LoaderNameError, match="too late"):
        module("keeper").calls[0].register("late", object)


def test_a_veto_stops_the_load_and_names_the_plugin(install):
    install(
        "guard", "from weightloaders.errors import PlanError\n@hookimpl\ndef before_load(plan): raise PlanError('no')"
    )
    with pytest.raises(PlanError, match="no") as caught:
        hooks.before_load("plan")
    assert caught.value.plugin == "guard 1.0 (guard)"


@pytest.mark.parametrize("failure", ["1/0", "raise SystemExit(2)"])
@pytest.mark.parametrize(("hook", "argument"), [("before_load", "plan"), ("rules_for", "model")])
def test_a_hook_that_fails_before_the_load_stops_it(install, hook, argument, failure):
    install("failing", f"@hookimpl\ndef {hook}({argument}):\n    {failure}\n")
    with pytest.raises(BrokenPluginError, match=rf"'failing' of failing 1\.0 \(failing\) failed in {hook}: ") as caught:
        getattr(hooks, hook)("x")
    assert caught.value.plugin == "failing 1.0"
    assert "WEIGHTLOADERS_DISABLE=failing" in caught.value.hint


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("async def before_load(plan): pass", "an `async` function"),
        ("async def rules_for(model): yield", "an `async` function"),
        ("def before_load(plan):\n    yield", "holds a `yield`"),
        ("def after_load(report):\n    yield", "holds a `yield`"),
        ("def register_loaders(registrar):\n    yield", "holds a `yield`"),
    ],
)
def test_a_hook_of_which_calling_it_runs_nothing_is_refused_rather_than_passed_over(install, hook, said):
    install("idle", f"@hookimpl\n{hook}\n")
    hooks.load_plugins()
    found, error = status("idle")
    assert found == "broken"
    assert said in error


def test_a_rule_error_from_a_plugin_stays_one(install):
    failing = "@hookimpl\ndef rules_for(model):\n    raise RuleError('bad')\n    yield"
    install("failing", f"from weightloaders.errors import RuleError\n{failing}")
    with pytest.raises(RuleError, match="bad") as caught:
        hooks.rules_for("x")
    assert caught.value.plugin == "failing 1.0 (failing)"


FAILING_WATCHER = """
@hookimpl
def on_progress(event):
    calls.append(event)
    raise {error}
@hookimpl
def after_load(report):
    raise {error}
"""


@pytest.mark.parametrize("error", ["ValueError('oh')", "SystemExit", "type('Boom', (BaseException,), {})"])
def test_a_hook_that_fails_while_watching_is_logged_once_in_a_load(install, caplog, error):
    install("failing", FAILING_WATCHER.format(error=error))
    install("watcher", WATCHER)
    for _ in range(2):
        caplog.clear()
        hooks.before_load("plan")
        for event in (1, 2, 3):
            hooks.on_progress(event)
        assert [r.getMessage() for r in caplog.records] == [
            "on_progress of the hook plugin failing 1.0 (failing) failed"
        ]
    assert module("failing").calls == [1, 1]
    assert [event for kind, event in module("watcher").calls if kind == "progress"] == [1, 2, 3, 1, 2, 3]
    hooks.after_load("report")
    assert caplog.records[-1].getMessage() == "after_load of the hook plugin failing 1.0 (failing) failed"
    assert module("watcher").calls[-1] == ("after", "report")


def test_an_interrupt_in_a_hook_passes(install):
    install("failing", FAILING_WATCHER.format(error="KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        hooks.on_progress(1)


def test_isolation_restores_the_plugins_that_were_known(install):
    install("watcher", WATCHER)
    hooks.load_plugins()
    with hooks.isolated():
        assert hooks.known_plugins() == ()
    assert [p.plugin.name for p in hooks.known_plugins()] == ["watcher"]


def test_hooks_import_nothing_heavy():
    code = "import sys, weightloaders.hooks; print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
