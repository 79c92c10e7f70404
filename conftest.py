"""What the tests of the library and of all plugins in this repository share."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from weightloaders.testing import only_plugins

if TYPE_CHECKING:
    from collections.abc import Iterator

# It takes part in every load, and warns of files that nobody has a checksum of: its own tests are about that.
_SPEAKS_UP = "weightloaders-checksum"
# In processes that tests start it is not hidden.
os.environ["WEIGHTLOADERS_CHECKSUM_UNKNOWN"] = "ignore"


@pytest.fixture(scope="session", autouse=True)
def quiet_hooks() -> Iterator[None]:
    """Plugins that speak up in every load are hidden, save from their own tests."""
    with only_plugins(*(d.name for d in metadata.distributions() if d.name != _SPEAKS_UP)):
        yield
