"""As much of vLLM's interface as the plugin uses, for where vLLM isn't installed.

`test_vllm_engine` holds its names to the real ones.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class EngineArgs:
    load_format: str = "auto"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)

    def create_load_config(self) -> LoadConfig:
        return LoadConfig(self.load_format, self.model_loader_extra_config)


class BaseModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class BaseKVCacheMethod:
    pass


_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.distributed": {"get_world_group": lambda: SimpleNamespace(world_size=1, cpu_group=None)},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda layer: False},
    "vllm.model_executor.layers.quantization": {},
    "vllm.model_executor.layers.quantization.kv_cache": {"BaseKVCacheMethod": BaseKVCacheMethod},
    "vllm.model_executor.model_loader": {"_LOAD_FORMAT_TO_MODEL_LOADER": {}},
    "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
    "vllm.model_executor.model_loader.weight_tying": {"_get_untied_lm_head": lambda model: None},
    "vllm.model_executor.model_loader.reload": {},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "LAYERWISE_INFO": {}, "LOADING_LAYERS": set(), "_place_kernel_tensors": lambda layer, info: None,
    },
}  # fmt: skip
NAMES = [(module, name) for module, names in _MODULES.items() for name in names]


def install(monkeypatch) -> dict[str, type]:
    """Put it in vLLM's place until the test ends.

    Returns:
        The load formats that are registered.
    """
    for name in [name for name in sys.modules if name.startswith("weightloaders_vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, attributes in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    monkeypatch.setattr(EngineArgs, "create_load_config", EngineArgs.create_load_config)
    formats: dict[str, type] = {}
    monkeypatch.setattr(sys.modules["vllm.model_executor.model_loader"], "_LOAD_FORMAT_TO_MODEL_LOADER", formats)
    return formats
