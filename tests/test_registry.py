"""Names become loaders: built-in, installed, from hooks, registered in the process; and what is wrong is said."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import tomllib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import weightloaders
from weightloaders import load_into, open_weights
from weightloaders.discovery import installed
from weightloaders.errors import (
    BrokenPluginError,
    CheckpointFormatError,
    LoaderConflictError,
    LoaderContractError,
    LoaderDisabledError,
    LoaderNameError,
    OptionsError,
    RegistryError,
    SourceError,
    UnknownLoaderError,
    WeightLoadersError,
)
from weightloaders.loaders.base import BaseWeightLoader
from weightloaders.offers import BUILT_IN, name_of
from weightloaders.testing import fake_distribution, isolated_registry

ROOT = Path(__file__).parents[1]
LOADERS = "weightloaders.loaders"
HOOKS = "weightloaders.hooks"

A_LOADER = """
from weightloaders import BaseWeightLoader

class Loader(BaseWeightLoader):
    description = "reads {module}"
    def __init__(self, size: int = 1):
        self.size = size
    def get_weights(self, model_name_or_path):
        return {{}}
"""


A_PROBE = """
    @classmethod
    def probe(cls, path):
        from weightloaders import Probe
        return Probe.yes()
"""


class Mine(BaseWeightLoader):
    def __init__(self, file_pattern="*.bin", dtype=torch.float32):
        self.file_pattern = file_pattern
        self.dtype = dtype

    def get_weights(self, model_name_or_path):
        return {}


class Other(BaseWeightLoader):
    def get_weights(self, model_name_or_path):
        return {}


@pytest.fixture
def registry(monkeypatch):
    # What happens to be installed beside the library must not decide these tests.
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "weightloaders-npz")
    with isolated_registry() as isolated:
        yield isolated


@pytest.fixture
def install(tmp_path):
    """Install distributions whose loaders live in modules of their own."""
    with ExitStack() as stack:

        def add(distribution, loaders, *, version="1.0", folder=None, group=LOADERS, modules=None):
            if modules is None:
                names = {target.partition(":")[0] for target in loaders.values()}
                modules = {name: A_LOADER.format(module=name) for name in names}
            return stack.enter_context(
                fake_distribution(
                    folder or tmp_path, distribution, version, entry_points={group: loaders}, modules=modules
                )
            )

        yield add


@contextmanager
def on_path(folder):
    # Not monkeypatch's: that would bring back, at its end, the path as it was with the distributions on it.
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def described(registry, name):
    return [d for d in registry.describe() if d.name == name]


# ------------------------------------------------------------------ built-ins


def test_the_built_in_table_equals_what_pyproject_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"][LOADERS] == BUILT_IN


def test_the_built_in_table_equals_what_is_installed():
    own = [p for p in installed(LOADERS) if p.comes_from("weightloaders")]
    if not own:
        pytest.skip("the package is not installed; it runs from its source tree")
    assert {p.name: p.target for p in own} == BUILT_IN


def test_built_ins_are_there_without_any_metadata(registry, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    assert registry.list_available() == sorted(BUILT_IN)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"auto"}))
def test_each_built_in_loads_as_a_loader(registry, name):
    assert issubclass(registry.get(name), BaseWeightLoader)


def test_looking_at_the_registry_imports_neither_torch_nor_transformers_nor_pydantic():
    code = """
import sys
from weightloaders.registry import WeightLoaderRegistry
assert "hf" in WeightLoaderRegistry.list_available(hooks=True)
assert {d.status for d in WeightLoaderRegistry.describe() if d.origin == "built-in"} == {"ok"}
print(sorted({"torch", "transformers", "pydantic", "numpy", "huggingface_hub"} & set(sys.modules)))
"""
    environment = {**os.environ, "WEIGHTLOADERS_DISABLE": "*"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_is_described_as_it_describes_itself(registry, name):
    assert registry.describe(name).description == registry.get(name).description


# ------------------------------------------------------------------ run time


def test_a_registered_class_is_created_with_its_options(registry):
    registry.register("my_custom", Mine)
    loader = registry.create("my_custom", dtype=torch.bfloat16, file_pattern="*.weights")
    assert (type(loader), loader.dtype, loader.file_pattern) == (Mine, torch.bfloat16, "*.weights")
    assert registry.get("my_custom") is Mine
    assert "my_custom" in registry.list_available()


def test_an_option_called_name_reaches_the_loader(registry):
    class Named(Other):
        def __init__(self, name="x"):
            self.name = name

    registry.register("named", Named)
    assert registry.create("named", name="y").name == "y"


@pytest.mark.parametrize("factory", [lambda size=1: Mine(file_pattern=size), functools.partial(Mine, dtype=None)])
def test_a_factory_is_as_good_as_a_class(registry, factory):
    registry.register("made", factory)
    assert isinstance(registry.create("made"), Mine)
    assert registry.get("made") is factory
    assert registry.describe("made").origin == "run time"


def test_what_a_factory_returns_is_checked(registry):
    registry.register("made", lambda: {"w": 1})
    with pytest.raises(LoaderContractError, match="factory of 'made' returned a dict"):
        registry.create("made")


def test_a_class_without_get_weights_is_refused_when_it_is_registered(registry):
    class Unfinished(BaseWeightLoader):
        pass

    with pytest.raises(LoaderContractError, match=r"Unfinished does not define get_weights"):
        registry.register("unfinished", Unfinished)
    assert "unfinished" not in registry.list_available()


def test_a_class_that_only_looks_like_a_loader_is_refused(registry):
    class Duck:
        def get_weights(self, model_name_or_path):
            return {}

    with pytest.raises(LoaderContractError, match="does not derive from BaseWeightLoader"):
        registry.register("duck", Duck)


@pytest.mark.parametrize("thing", ["weightloaders.loaders.local:LocalLoader", 3, None, Mine()])
def test_neither_text_nor_instances_are_registered(registry, thing):
    with pytest.raises(LoaderContractError):
        registry.register("thing", thing)


@pytest.mark.parametrize("name", ["", "My_Loader", "a:b", "a b", "-a", "ä", "a/b", 3, None])
def test_a_malformed_name_is_refused(registry, name):
    with pytest.raises(LoaderNameError):
        registry.register(name, Mine)


def test_a_taken_name_is_refused_and_replaced_on_demand(registry):
    registry.register("mine", Mine)
    registry.register("mine", Mine)  # the same again, as a module that is reloaded does
    with pytest.raises(LoaderNameError, match=r"'mine' is taken by .*:Mine"):
        registry.register("mine", Other)
    registry.register("mine", Other, replace=True)
    assert registry.get("mine") is Other


def test_a_built_in_is_replaced_only_on_demand_and_comes_back(registry):
    with pytest.raises(LoaderNameError, match="built-in"):
        registry.register("local", Mine)
    registry.register("local", Mine, replace=True)
    assert registry.get("local") is Mine
    statuses = {d.origin: d.status for d in described(registry, "local")}
    assert statuses == {"run time": "ok", "built-in": "conflict"}
    assert registry.get("weightloaders:local") is not Mine
    registry.unregister("local")
    assert registry.get("local").__name__ == "LocalLoader"


@pytest.mark.parametrize("name", ["nothing", "local"])
def test_only_what_was_registered_is_unregistered(registry, name):
    with pytest.raises(UnknownLoaderError, match=f"no loader named '{name}' was registered"):
        registry.unregister(name)


def test_isolation_forgets_registrations_and_restores_what_was_unregistered(registry):
    registry.register("outer", Mine)
    with registry.isolated():
        registry.register("inner", Mine)
        registry.unregister("outer")
    assert "outer" in registry.list_available()
    assert "inner" not in registry.list_available()


def test_registrations_from_many_threads_are_all_kept(registry):
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        for k in range(20):
            registry.register(f"t{i}-{k}", Mine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(name.startswith("t") and "-" in name for name in registry.list_available()) == 160


# ------------------------------------------------------------------ whatever may be given for a loader


def test_a_loader_is_given_as_name_class_instance_factory_or_target(registry):
    registry.register("mine", Mine)
    instance = Mine()
    assert isinstance(registry.resolve("mine"), Mine)
    assert registry.resolve(Mine, {"file_pattern": "x"}).file_pattern == "x"
    assert registry.resolve(lambda: instance) is instance
    assert registry.resolve(instance) is instance
    assert type(registry.resolve("weightloaders.loaders.local:LocalLoader")).__name__ == "LocalLoader"


def test_options_with_an_instance_are_refused(registry):
    with pytest.raises(OptionsError, match=r"instance of Mine already.*dtype"):
        registry.resolve(Mine(), {"dtype": None})


@pytest.mark.parametrize("thing", [None, 3, {"loader": "local"}, Path("local"), BaseWeightLoader])
def test_what_can_not_be_a_loader_is_refused(registry, thing):
    with pytest.raises(RegistryError):
        registry.resolve(thing)


@pytest.mark.parametrize("options", [["dtype"], "dtype", {1: 2}])
def test_options_that_are_no_mapping_of_names_are_refused(registry, options):
    with pytest.raises(OptionsError, match="must be a mapping of names"):
        registry.resolve(Mine, options)


def test_a_target_that_does_not_exist_is_unknown(registry):
    with pytest.raises(UnknownLoaderError, match="No module named 'no_such_package'"):
        registry.create("no_such_package.module:Loader")
    with pytest.raises(UnknownLoaderError, match="no attribute 'NoSuch'"):
        registry.create("weightloaders.loaders.local:NoSuch")


def test_a_target_whose_module_fails_says_so(registry, install):
    install("x", {}, modules={"failing": "import not_installed_anywhere", "stumbling": "import os; os.nothing"})
    with pytest.raises(BrokenPluginError, match="not_installed_anywhere") as caught:
        registry.create("failing:Loader")
    assert "install 'not_installed_anywhere'" in caught.value.hint
    with pytest.raises(BrokenPluginError, match="has no attribute 'nothing'"):
        registry.create("stumbling:Loader")


class Boom(BaseException):
    pass


class Moody(type(BaseWeightLoader)):
    mood: BaseException = RuntimeError("not for you")

    @property
    def description(cls):
        raise Moody.mood


@pytest.mark.parametrize("mood", [RuntimeError("not for you"), Boom("not for you")])
def test_a_class_that_fails_when_it_is_looked_at_is_refused_by_our_own_error(registry, monkeypatch, mood):
    monkeypatch.setattr(Moody, "mood", mood)

    class Hidden(Other, metaclass=Moody):
        pass

    for attempt in (registry.resolve, lambda loader: registry.register("hidden", loader)):
        with pytest.raises(BrokenPluginError, match=r"Hidden' can't be looked at: .*not for you"):
            attempt(Hidden)
    monkeypatch.setattr(Moody, "mood", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        registry.resolve(Hidden)


def test_what_was_created_knows_how_it_was_asked_for(registry, install):
    install("loaders-x", {"x": "x_module:Loader"})
    registry.register("mine", Mine)
    registry.register("made", lambda: Mine())
    for loader, name in [
        ("x", "x"), ("loaders-x:x", "loaders-x:x"), ("x_module:Loader", "x_module:Loader"), ("mine", "mine"),
        ("made", "made"), (Other, "Other"), (Mine(), "Mine"), ("local", "local"),
        (registry.get("hf"), "hf"), (registry.get("local")(), "local"),
    ]:  # fmt: skip
        assert name_of(registry.resolve(loader)) == name


def test_auto_gives_the_name_of_the_loader_that_it_chose(registry, install, tmp_path):
    install("loaders-x", {"x-format": "x_module:Loader"}, modules={"x_module": A_LOADER.format(module="x") + A_PROBE})
    (tmp_path / "file.x").touch()
    assert name_of(registry.resolve("auto", source=str(tmp_path / "file.x"))) == "x-format"


# ------------------------------------------------------------------ installed


def test_an_installed_loader_is_listed_without_being_imported(registry, install):
    install("loaders-x", {"x-format": "x_module:Loader"})
    assert "x-format" in registry.list_available()
    assert "x_module" not in sys.modules
    assert registry.create("x-format", size=3).size == 3
    description = registry.describe("x-format")
    assert (description.origin, description.distribution, description.version) == ("entry point", "loaders-x", "1.0")
    assert (description.target, description.status, description.description) == (
        "x_module:Loader",
        "ok",
        "reads x_module",
    )


def test_choosing_one_loader_imports_no_other(registry, install):
    install("loaders-x", {"x": "x_module:Loader"})
    install("loaders-y", {"y": "y_module:Loader"})
    registry.create("x")
    registry.create("local")
    assert "y_module" not in sys.modules


METACLASS = """
from abc import ABCMeta
from weightloaders import BaseWeightLoader

class Meta(ABCMeta):
    def __getattribute__(cls, name):
        if name == "{name}":
            raise RuntimeError("not for you")
        return super().__getattribute__(name)

class Loader(BaseWeightLoader, metaclass=Meta):
    def get_weights(self, path): ...
"""

BREAKAGES = {
    "import": ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
    "attribute": ("other = 1", "has no attribute 'Loader'"),
    "syntax": ("def", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "its own kind": ("class Boom(BaseException): pass\nraise Boom('bang')", "Boom: bang"),
    "an error without a text": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "Odd: (its text can't be had: ValueError)",
    ),
    "an error with an odd name": ("raise ModuleNotFoundError('gone', name=3)", "gone"),
    "its metaclass": (METACLASS.format(name="description"), "RuntimeError: not for you"),
    "contract": ("class Loader: pass", "does not derive from BaseWeightLoader"),
    "abstract": (
        "from weightloaders import BaseWeightLoader as B\nclass Loader(B): pass",
        "does not define get_weights",
    ),
}


REQUIRING = """
from weightloaders import BaseWeightLoader
class Loader(BaseWeightLoader):
    requires = {requires}
    def get_weights(self, model_name_or_path): return {{}}
"""


def test_a_loader_that_lacks_what_it_requires_is_listed_with_what_brings_it(registry, install):
    requires = '{"json": "json", "absent_one": "some-plugin[one]", "absent_two.inner": "some-plugin[two]"}'
    modules = {"its_module": REQUIRING.format(requires=requires)}
    install("loaders-lacking", {"lacking": "its_module:Loader"}, modules=modules)
    found = registry.describe("lacking")
    assert found.status == "incomplete"
    assert found.error == (
        "not installed: absent_one, absent_two.inner; pip install 'some-plugin[one]' 'some-plugin[two]'"
    )
    # It may be of use without them, and knows best itself.
    assert registry.create("lacking").get_weights("x") == {}


@pytest.mark.parametrize("requires", ['{"json": "json"}', "3", "None", '["absent"]', "{}", '{"": ""}'])
def test_what_a_loader_requires_never_makes_listing_fail(registry, install, requires):
    install("loaders-x", {"x": "x_module:Loader"}, modules={"x_module": REQUIRING.format(requires=requires)})
    assert registry.describe("x").status == ("incomplete" if requires == '{"": ""}' else "ok")


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_plugin_is_listed_with_its_error_and_breaks_no_other(registry, install, kind):
    source, complaint = BREAKAGES[kind]
    install("loaders-bad", {"bad": "bad_module:Loader"}, version="2.5", modules={"bad_module": source})
    install("loaders-good", {"good": "good_module:Loader"})
    (bad,) = described(registry, "bad")
    assert bad.status == "broken"
    assert complaint in bad.error
    assert registry.describe("good").status == "ok"
    assert registry.create("good")
    with pytest.raises(RegistryError, match=r"loaders-bad 2\.5") as caught:
        registry.create("bad")
    assert caught.value.plugin == "loaders-bad 2.5"
    assert complaint in str(caught.value)


def test_a_broken_plugin_names_target_cause_and_remedy(registry, install):
    install("loaders-bad", {"bad": "bad_module:Loader"}, modules={"bad_module": "import not_installed_anywhere"})
    with pytest.raises(BrokenPluginError) as caught:
        registry.get("bad")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    for part in ("'bad'", "loaders-bad 1.0", "bad_module:Loader", "install 'not_installed_anywhere'"):
        assert part in str(caught.value)


def test_an_interrupt_while_a_plugin_is_imported_passes(registry, install):
    install("loaders-bad", {"bad": "bad_module:Loader"}, modules={"bad_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        registry.get("bad")
    with pytest.raises(KeyboardInterrupt):
        registry.describe()


def test_a_repaired_plugin_works_without_a_restart(registry, install):
    site = install("loaders-bad", {"bad": "bad_module:Loader"}, modules={"bad_module": "raise ImportError('not yet')"})
    assert registry.describe("bad").status == "broken"
    # Of another length, so that the stale byte code can't pass for it.
    (site / "bad_module.py").write_text(A_LOADER.format(module="bad_module"), encoding="utf-8")
    assert registry.describe("bad").status == "ok"


def test_two_distributions_with_one_name_are_a_conflict_until_one_is_picked(registry, install, monkeypatch):
    install("loaders-one", {"twice": "one_module:Loader"}, version="1.1")
    install("loaders.two", {"twice": "two_module:Loader"}, version="2.2")
    with pytest.raises(LoaderConflictError) as caught:
        registry.create("twice")
    for part in ("loaders-one 1.1", "one_module:Loader", "loaders.two 2.2", "two_module:Loader", "'loaders-one:twice'"):
        assert part in str(caught.value)
    assert registry.list_available().count("twice") == 1
    found = described(registry, "twice")
    assert [(d.distribution, d.status) for d in found] == [("loaders-one", "conflict"), ("loaders.two", "conflict")]
    assert all("loaders-one 1.1" in d.error and "loaders.two 2.2" in d.error for d in found)

    assert registry.get("loaders-one:twice").description == "reads one_module"
    assert registry.get("Loaders_Two:twice").description == "reads two_module"
    assert registry.describe("loaders.two:twice").version == "2.2"
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "loaders-two")
    assert registry.get("twice").description == "reads one_module"
    assert registry.describe("twice").status == "ok"


def test_a_distribution_seen_twice_is_one(registry, install, tmp_path):
    for folder in ("a", "b"):
        install("loaders-x", {"x": "x_module:Loader"}, folder=tmp_path / folder)
    assert registry.create("x")
    assert len(described(registry, "x")) == 1


def test_of_two_versions_in_one_folder_the_newer_counts(registry, install):
    site = install("loaders-x", {"x": "x_module:Loader"}, version="1.9")
    newer = site / "~oaders_x-1.10.dist-info"
    newer.mkdir()
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: loaders_x\nVersion: 1.10\n", encoding="utf-8")
    (newer / "entry_points.txt").write_text(f"[{LOADERS}]\nx = x_module:Loader\n", encoding="utf-8")
    (description,) = described(registry, "x")
    assert description.version == "1.10"


def test_an_empty_stale_dist_info_does_not_hide_the_real_one(registry, install, tmp_path):
    install("loaders-x", {"x": "x_module:Loader"})
    (tmp_path / "stale" / "loaders_x-0.9.dist-info").mkdir(parents=True)
    with on_path(tmp_path / "stale"):
        assert registry.describe("x").version == "1.0"
        assert registry.create("x")


def leave_behind(folder, name, target):
    """What an incomplete uninstall leaves: entry points without METADATA."""
    stale = folder / f"loaders_{name}-0.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "entry_points.txt").write_text(f"[{LOADERS}]\n{name} = {target}\n", encoding="utf-8")


def test_leftovers_without_metadata_are_diagnosed(registry, tmp_path):
    for name in ("y", "z"):
        leave_behind(tmp_path, name, f"gone_{name}:Loader")
    with on_path(tmp_path):
        for name in ("y", "z"):
            (description,) = described(registry, name)
            assert (description.status, description.distribution) == ("broken", "unknown")
            assert f"No module named 'gone_{name}'" in description.error


def test_a_leftover_without_metadata_is_no_rival_of_its_successor(registry, install, tmp_path):
    install("loaders-x", {"x": "x_module:Loader"})
    leave_behind(tmp_path / "stale", "x", "x_module:Loader")
    with on_path(tmp_path / "stale"):
        assert registry.describe("x").status == "ok"
        assert registry.create("x")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (f"[{LOADERS}]\nno equals sign\n".encode(), "loaders-z"),
        (f"[{LOADERS}]\nz = not a target!\n".encode(), "z"),
        (f"[{LOADERS}]\nMy Loader = z:Loader\n".encode(), "My Loader"),
    ],
)
def test_malformed_entry_points_are_listed_as_broken(registry, install, content, name):
    site = install("loaders-z", {})
    (site / "loaders_z-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    install("loaders-good", {"good": "good_module:Loader"})
    (description,) = described(registry, name)
    assert (description.status, description.distribution) == ("broken", "loaders-z")
    with pytest.raises(BrokenPluginError, match=r"loaders-z 1\.0"):
        registry.get(name)
    assert name not in registry.list_available()
    assert registry.create("good")


def test_undecodable_entry_points_of_anybody_disturb_nobody(registry, install):
    site = install("stranger", {})
    (site / "stranger-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[" + LOADERS.encode())
    install("loaders-good", {"good": "good_module:Loader"})
    assert registry.describe("good").status == "ok"


def test_an_installed_loader_does_not_shadow_a_built_in(registry, install):
    install("loaders-evil", {"local": "evil_module:Loader"})
    assert registry.get("local").__module__ == "weightloaders.loaders.local"
    ours, theirs = sorted(described(registry, "local"), key=lambda d: d.status, reverse=True)
    assert (ours.origin, ours.status) == ("built-in", "ok")
    assert theirs.status == "conflict"
    assert "'local' means the built-in" in theirs.error
    assert "evil_module" not in sys.modules
    assert registry.get("loaders-evil:local").description == "reads evil_module"


def test_an_installed_name_is_taken_for_registration(registry, install):
    install("loaders-x", {"x": "x_module:Loader"})
    with pytest.raises(LoaderNameError, match=r"loaders-x 1\.0"):
        registry.register("x", Mine)
    registry.register("x", Mine, replace=True)
    assert registry.get("x") is Mine
    assert {d.origin: d.status for d in described(registry, "x")} == {"run time": "ok", "entry point": "conflict"}


def test_a_module_may_register_what_its_own_entry_point_declares(registry, install):
    source = A_LOADER.format(module="x") + (
        "from weightloaders import WeightLoaderRegistry\nWeightLoaderRegistry.register('x', Loader)\n"
    )
    install("loaders-x", {"x": "x_module:Loader"}, modules={"x_module": source})
    assert registry.get("x") is registry.get("x_module:Loader")


def test_our_own_metadata_of_another_version_adds_nothing(registry, install):
    install("Weight_Loaders".replace("_L", "l"), {"local": "evil_module:Loader", "old": "evil_module:Loader"})
    assert registry.get("local").__module__ == "weightloaders.loaders.local"
    assert "old" not in registry.list_available()


# ------------------------------------------------------------------ loaders that fail when they are used

FAILING = """
import torch
from weightloaders import BaseWeightLoader

ZERO = {{"weight": torch.zeros(1, 1)}}

class Boom(BaseException):
    pass

class Raises:
    def __get__(self, loader, owner=None):
        raise {error}

class Loader(BaseWeightLoader):
    {member}
    if "get_weights" not in vars():
        def get_weights(self, path): return ZERO
"""

WAYS_TO_FAIL = {
    "get_weights": "def get_weights(self, path): raise {error}",
    "get_weights as a generator": "def get_weights(self, path):\n        raise {error}\n        yield",
    "get_weights on the way": "def get_weights(self, path):\n        yield from ZERO.items()\n        raise {error}",
    "borrowed": "borrowed = Raises()",
    "load_weights": "def load_weights(self, model, weights): raise {error}",
    "load_weights itself": "load_weights = Raises()",
}


@pytest.mark.parametrize("error", ["RuntimeError('oh no')", "SystemExit('oh no')", "Boom('oh no')"])
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_a_loader_that_fails_in_any_way_is_named(registry, install, way, error):
    source = FAILING.format(member=WAYS_TO_FAIL[way].format(error=error), error=error)
    install("loaders-bad", {"bad": "bad_module:Loader"}, version="2.5", modules={"bad_module": source})
    with pytest.raises(WeightLoadersError, match=f"{error.partition('(')[0]}: oh no") as caught:
        load_into(torch.nn.Linear(1, 1, bias=False), "the/source", loader="bad", progress=False)
    assert caught.value.plugin == "loaders-bad 2.5"
    assert "loaders-bad 2.5" in str(caught.value)
    if way in ("get_weights", "borrowed"):
        with pytest.raises(SourceError, match="oh no"):
            open_weights("the/source", "bad")


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_an_interrupt_in_a_loader_passes(registry, install, way):
    source = FAILING.format(member=WAYS_TO_FAIL[way].format(error="KeyboardInterrupt"), error="KeyboardInterrupt")
    install("loaders-bad", {"bad": "bad_module:Loader"}, modules={"bad_module": source})
    with pytest.raises(KeyboardInterrupt):
        load_into(torch.nn.Linear(1, 1, bias=False), "the/source", loader="bad", progress=False)


def test_an_error_of_ours_from_a_plugins_loader_names_the_plugin(registry, install):
    raising = "def get_weights(self, path):\n        from weightloaders.errors import CheckpointFormatError as E\n"
    raising += "        raise E('a bad file')"
    source = FAILING.format(member=raising, error="None")
    install("loaders-bad", {"bad": "bad_module:Loader"}, version="2.5", modules={"bad_module": source})
    with pytest.raises(CheckpointFormatError, match=r"a bad file\n  plugin: loaders-bad 2\.5"):
        open_weights("the/source", "bad")


# ------------------------------------------------------------------ disabled


@pytest.mark.parametrize("disabled", ["bad", "loaders-bad", "Loaders_Bad", " other , bad ", "*"])
def test_what_is_disabled_is_never_imported(registry, install, monkeypatch, disabled):
    install("loaders-bad", {"bad": "bad_module:Loader"})
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", disabled)
    assert "bad" not in registry.list_available(hooks=True)
    (description,) = described(registry, "bad")
    assert description.status == "disabled"
    for name in ("bad", "loaders-bad:bad", "bad_module:Loader"):
        with pytest.raises(LoaderDisabledError, match="WEIGHTLOADERS_DISABLE"):
            registry.create(name)
    assert "bad_module" not in sys.modules


def test_a_star_disables_third_parties_only(registry, monkeypatch):
    registry.register("mine", Mine)
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "*")
    assert registry.list_available() == sorted([*BUILT_IN, "mine"])
    assert registry.create("local")


def test_a_built_in_is_disabled_by_name(registry, monkeypatch):
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "torch,mine")
    registry.register("mine", Mine)
    for name in ("torch", "mine"):
        with pytest.raises(LoaderDisabledError):
            registry.get(name)
        assert name not in registry.list_available()
        assert registry.describe(name).status == "disabled"


# ------------------------------------------------------------------ unknown


def test_an_unknown_name_brings_the_nearest_and_all_names(registry):
    registry.register("my_custom", Mine)
    with pytest.raises(UnknownLoaderError) as caught:
        registry.create("my_costum")
    assert isinstance(caught.value, LookupError)
    assert "did you mean 'my_custom'?" in str(caught.value)
    assert "available: auto, binary, dummy, hf, http, local, my_custom, torch" in str(caught.value)
    with pytest.raises(UnknownLoaderError, match="did you mean 'hf'"):
        registry.get("HF")
    with pytest.raises(UnknownLoaderError):
        registry.describe("nothing")


@pytest.mark.parametrize("name", ["gguf", "remote", "npz"])
def test_an_unknown_name_of_a_known_format_names_the_package_to_install(registry, monkeypatch, name):
    if any(p.name == name for p in installed(LOADERS)):
        pytest.skip("it is installed here")
    with pytest.raises(UnknownLoaderError) as caught:
        registry.create(name)
    assert caught.value.hint == f"pip install weightloaders-{name}"


@pytest.mark.parametrize("name", ["no-such-dist:local", "weightloaders:nothing", ":local", "a:b:c"])
def test_a_distribution_that_offers_no_such_name_is_unknown(registry, name):
    with pytest.raises(UnknownLoaderError):
        registry.get(name)


def test_a_run_time_registration_is_not_known_in_a_spawned_worker_and_the_error_says_what_to_do(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        """
import multiprocessing
from weightloaders import BaseWeightLoader, WeightLoaderRegistry

class Mine(BaseWeightLoader):
    def get_weights(self, model_name_or_path):
        return {}

def work(name):
    try:
        return type(WeightLoaderRegistry.create(name)).__name__
    except LookupError as error:
        return str(error)

if __name__ == "__main__":
    WeightLoaderRegistry.register("mine", Mine)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, ["mine", "program:Mine"]))
""",
        encoding="utf-8",
    )
    # Absolute, as the program runs elsewhere.
    environment = {**os.environ, "PYTHONPATH": str(Path(weightloaders.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert "no loader is named 'mine'" in done.stdout
    assert "another process registered" in done.stdout
    assert "package.module:Class" in done.stdout
    assert done.stdout.strip().endswith("'Mine']")


# ------------------------------------------------------------------ hooks

A_HOOK = """
import weightloaders
from weightloaders import BaseWeightLoader

class Loader(BaseWeightLoader):
    description = "from a hook"
    def get_weights(self, model_name_or_path):
        return {}

@weightloaders.hookimpl
def register_loaders(registrar):
    registrar.register("hooked", Loader)
"""


def test_loaders_from_hooks_are_found_when_nothing_else_has_the_name(registry, install):
    install("hooks-x", {"x": "hook_module"}, group=HOOKS, modules={"hook_module": A_HOOK})
    assert "hooked" not in registry.list_available()
    registry.create("local")
    assert "hook_module" not in sys.modules
    assert registry.get("hooked").description == "from a hook"
    assert "hooked" in registry.list_available()
    description = registry.describe("hooks-x:hooked")
    assert (description.origin, description.distribution, description.version, description.target) == (
        "hook",
        "hooks-x",
        "1.0",
        "hook_module:Loader",
    )


def test_listing_with_hooks_imports_them(registry, install):
    install("hooks-x", {"x": "hook_module"}, group=HOOKS, modules={"hook_module": A_HOOK})
    assert "hooked" in registry.list_available(hooks=True)


def test_an_entry_point_comes_before_a_hook_whenever_the_hook_is_imported(registry, install):
    install("hooks-x", {"x": "hook_module"}, group=HOOKS, modules={"hook_module": A_HOOK})
    install("loaders-x", {"hooked": "x_module:Loader"})
    assert registry.get("hooked").description == "reads x_module"
    registry.describe()
    assert registry.get("hooked").description == "reads x_module"
    assert {d.origin: d.status for d in described(registry, "hooked")} == {"entry point": "ok", "hook": "conflict"}
    assert registry.get("hooks-x:hooked").description == "from a hook"


def test_a_broken_hook_plugin_is_listed_and_mentioned_when_a_name_is_unknown(registry, install):
    install("hooks-bad", {"hook": "hook_module"}, group=HOOKS, modules={"hook_module": A_HOOK + "\nraise SystemExit"})
    with pytest.raises(UnknownLoaderError, match=r"a plugin that might have brought it is broken.*hooks-bad 1\.0"):
        registry.get("hooked")
    assert registry.describe("hook").status == "broken"
    (description,) = described(registry, "hook")
    assert (description.origin, description.distribution, description.status) == ("hook", "hooks-bad", "broken")
    assert not described(registry, "hooked")


@pytest.mark.parametrize("name", ["description", "__qualname__", "__module__"])
def test_a_class_from_a_hook_that_hides_itself_breaks_no_other(registry, install, name):
    hidden = METACLASS.format(name=name)
    hook = "import weightloaders\n@weightloaders.hookimpl\ndef register_loaders(registrar):\n    registrar.register"
    install("hooks-bad", {"x": "hook_module"}, group=HOOKS, modules={"hook_module": f"{hidden}\n{hook}('odd', Loader)"})
    install("hooks-good", {"y": "good_module"}, group=HOOKS, modules={"good_module": A_HOOK})
    assert registry.describe("hooked").status == "ok"
    (odd,) = described(registry, "odd")
    assert odd.distribution == "hooks-bad"
    assert odd.status == ("broken" if name == "description" else "ok")


def test_a_disabled_hook_plugin_is_never_imported(registry, install, monkeypatch):
    install("hooks-x", {"hook": "hook_module"}, group=HOOKS, modules={"hook_module": A_HOOK})
    monkeypatch.setenv("WEIGHTLOADERS_DISABLE", "*")
    assert "hooked" not in registry.list_available(hooks=True)
    assert registry.describe("hook").status == "disabled"
    assert "hook_module" not in sys.modules


def test_the_version_of_built_ins_is_ours(registry):
    description = registry.describe("local")
    assert (description.distribution, description.version) == ("weightloaders", weightloaders.__version__)


# ------------------------------------------------------------------ who was written for another version


@pytest.mark.parametrize(
    ("requires", "hint"),
    [
        (("numpy", "weightloaders>=99.1"), "install 'weightloaders>=99.1', which newer needs; this is weightloaders "),
        (("Weightloaders<0.0.1",), "install 'Weightloaders<0.0.1', which newer needs"),
        (("weightloaders>=0.0.1",), "repair or reinstall newer"),
        (("weightloaders !!",), "repair or reinstall newer"),
        ((), "repair or reinstall newer"),
    ],
)
def test_a_plugin_that_needs_another_version_of_this_library_says_which(tmp_path, requires, hint):
    modules = {"newer_module": "from weightloaders import ThingOfTheFuture"}
    points = {"weightloaders.loaders": {"newer": "newer_module:Loader"}}
    with (
        isolated_registry() as registry,
        fake_distribution(tmp_path, "newer", "3.0", entry_points=points, modules=modules, requires=requires),
        pytest.raises(BrokenPluginError, match="ThingOfTheFuture") as caught,
    ):
        registry.get("newer")
    assert caught.value.hint.startswith(hint)
