"""What an engine is, and how one is found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from weightloaders.discovery import import_target, imported, installed
from weightloaders.errors import ConfigError, MissingDependencyError
from weightloaders.validation import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightloaders.llm.outputs import Request, RequestOutput, SamplingParams
    from weightloaders.report import LoadReport

ENGINES = {"transformers": "weightloaders.llm.engines.transformers:TransformersEngine"}
# Engines of other packages are entry points of this group.
ENTRY_POINTS = "weightloaders.engines"
# Engine -> the package to install for it.
PACKAGES = {"vllm": "weightloaders-vllm"}


class Engine(Protocol):
    """Holds a model and its tokenizer, and writes text.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer, or None where there is none.
        load_report: What the last load did.
        default_params: How to write where nothing is said, as the model's generation config has it.
    """

    model: torch.nn.Module
    tokenizer: Any
    load_report: LoadReport | None
    default_params: SamplingParams

    @classmethod
    def load(cls, model: str, **options: Any) -> Engine:
        """Build and fill the model; the options are those of `LLM`, `load_options` those of `load_into` among them."""

    def generate(self, requests: Sequence[Request], *, show_progress: bool) -> list[RequestOutput]:
        """Write text for each request, in their order.

        Raises:
            HalfLoadedModelError: If the last load of the model's weights failed on the way.
            ModelError: If the model can't write text, or has no room for a prompt.
        """

    def reload_weights(self, source: Any, **load_options: Any) -> LoadReport:
        """Fill the same model again, in place; see `load_into` for the options."""


def engine_class(name: str) -> type[Engine]:
    """The engine of that name: one of ours, or one that an installed package offers.

    Raises:
        ConfigError: If there is none.
        MissingDependencyError: If it is known, and its package is not installed.
        BrokenPluginError: If its package can't be imported.
    """
    name = str(name)
    if name in ENGINES:
        return cast("type[Engine]", import_target(ENGINES[name]))
    offered = {plugin.name: plugin for plugin in installed(ENTRY_POINTS) if not plugin.is_disabled()}
    if name in offered:
        return cast("type[Engine]", imported(offered[name]))
    if name in PACKAGES:
        raise MissingDependencyError(
            f"engine={name!r} needs {PACKAGES[name]}, which is not installed", hint=f"pip install {PACKAGES[name]}"
        )
    raise ConfigError(f"engine {unknown(name, {*ENGINES, *offered})}")
