"""Lets these tests run from a source tree, where the package is not installed, and share what they write files with."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("weightloaders_gguf") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
