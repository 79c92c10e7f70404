"""`weightloaders.testing.only_plugins`: tests that are the same whatever else is installed."""

from __future__ import annotations

from weightloaders import WeightLoaderRegistry, hooks
from weightloaders.testing import fake_distribution, only_plugins

LOADER = """
from weightloaders import BaseWeightLoader

class Loader(BaseWeightLoader):
    def get_weights(self, model_name_or_path): ...
"""
HOOK = """
import weightloaders

@weightloaders.hookimpl
def before_load(plan):
    raise ValueError("no")
"""


def offered(name):
    return {"weightloaders.loaders": {name: f"{name}_module:Loader"}}


def test_plugins_of_other_distributions_are_hidden_and_those_that_the_block_installs_seen(tmp_path):
    hook = {"weightloaders.hooks": {"speaks-up": "speaking_module"}}
    with (
        fake_distribution(tmp_path, "Acme_One", entry_points=offered("one"), modules={"one_module": LOADER}),
        fake_distribution(tmp_path, "acme-two", entry_points=offered("two"), modules={"two_module": LOADER}),
        fake_distribution(tmp_path, "speaking", entry_points=hook, modules={"speaking_module": HOOK}),
    ):
        with only_plugins("acme-one") as registry:
            assert {"one", "local"} <= set(registry.list_available())
            assert "two" not in registry.list_available()
            assert not hooks.has_plugins()
            with fake_distribution(tmp_path, "acme-three", entry_points=offered("three")):
                assert {"one", "three"} <= set(registry.list_available())
            registry.register("mine", registry.get("one"))
        assert {"one", "two"} <= set(WeightLoaderRegistry.list_available())
        assert "mine" not in WeightLoaderRegistry.list_available()
