"""Lets these tests run from a source tree, where the package is not installed."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("weightloaders_meta") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
