"""How vLLM comes to know the load formats, and refuses mistakes in them before its engine starts."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader

from weightloaders import WeightLoaderRegistry
from weightloaders.errors import ConfigError
from weightloaders_vllm import FORMAT
from weightloaders_vllm.loader import WeightLoadersModelLoader
from weightloaders_vllm.options import check

# Near enough to our name to be a slip rather than somebody else's load format.
_SLIP = 0.8


def register_formats() -> None:
    """Register ``weightloaders``, and ``weightloaders:NAME`` for each loader there is. Twice is once."""
    known = model_loader._LOAD_FORMAT_TO_MODEL_LOADER  # noqa: SLF001 -- registering again would be warned about
    for load_format in (FORMAT, *(f"{FORMAT}:{name}" for name in WeightLoaderRegistry.list_available())):
        if known.get(load_format) is not WeightLoadersModelLoader:
            known[load_format] = WeightLoadersModelLoader
    _check_early()


def _check_early() -> None:
    """VLLM asks a loader first when the engine has started, in another process, after many seconds."""
    original = EngineArgs.create_load_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_load_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        head, _, loader = str(self.load_format).partition(":")
        if head.lower() == FORMAT:
            extra = config.model_loader_extra_config
            check(f"{FORMAT}:{loader}", extra)
            # vLLM makes names of load formats lower-case, and only those that it has been told of are known to it.
            config.load_format = FORMAT
            config.model_loader_extra_config = {**extra, "loader": loader} if loader else extra
        elif config.load_format not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:  # noqa: SLF001 -- as above
            _refuse_slip(head)
        return config

    EngineArgs.create_load_config = create_load_config


def _refuse_slip(load_format: str) -> None:
    if difflib.get_close_matches(load_format.lower(), [FORMAT], 1, _SLIP):
        raise ConfigError(f"there is no load_format {load_format!r}; did you mean {FORMAT!r}?")
