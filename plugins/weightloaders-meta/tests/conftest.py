"""Lets these tests run from a source tree, and whatever else is installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from weightloaders.testing import only_plugins

if importlib.util.find_spec("weightloaders_meta") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))


@pytest.fixture(autouse=True)
def no_other_plugins():
    """Hooks of other plugins take no part in these loads."""
    with only_plugins("weightloaders-meta"):
        yield
