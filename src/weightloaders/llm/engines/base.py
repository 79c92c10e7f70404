"""What an engine is, and how one is found by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from weightloaders.errors import ConfigError
from weightloaders.validation import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightloaders.llm.outputs import Request, RequestOutput, SamplingParams
    from weightloaders.report import LoadReport

ENGINES = {"transformers": "weightloaders.llm.engines.transformers:TransformersEngine"}


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
    """The engine of that name.

    Raises:
        ConfigError: If there is none.
    """
    target = ENGINES.get(str(name))
    if target is None:
        raise ConfigError(f"engine {unknown(str(name), ENGINES)}")
    module, _, attribute = target.partition(":")
    return cast("type[Engine]", getattr(importlib.import_module(module), attribute))
