"""How vLLM comes to know the load formats, and refuses mistakes in them before its engine starts."""

from __future__ import annotations

import functools
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader

from weightloaders import WeightLoaderRegistry
from weightloaders_vllm import FORMAT
from weightloaders_vllm.loader import WeightLoadersModelLoader
from weightloaders_vllm.options import check


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
        if config.load_format.partition(":")[0] == FORMAT:
            check(config.load_format, config.model_loader_extra_config)
        return config

    EngineArgs.create_load_config = create_load_config
