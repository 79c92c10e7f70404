"""How weightloaders meets this package: rules for Llamas, and the loader ``meta``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import weightloaders as wl
from weightloaders_meta.loader import MetaLoader
from weightloaders_meta.rules import rules_of

if TYPE_CHECKING:
    import torch

    from weightloaders.hooks import Registrar


@wl.hookimpl
def register_loaders(registrar: Registrar) -> None:
    """Offer the loader ``meta``."""
    registrar.register("meta", MetaLoader)


@wl.hookimpl
def rules_for(model: torch.nn.Module) -> list[wl.Rename | wl.Convert | wl.Drop] | None:
    """Meta's names become transformers', for a Llama of transformers'; nothing for any other model."""
    return rules_of(model)
