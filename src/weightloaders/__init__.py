"""Any checkpoint, into any PyTorch model, correctly, fast, through loaders that anybody can add.

The public names are resolved on first use, so that importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightloaders.api import (
        from_pretrained as from_pretrained,
    )
    from weightloaders.api import (
        load_into as load_into,
    )
    from weightloaders.api import (
        load_model as load_model,
    )
    from weightloaders.api import (
        open_weights as open_weights,
    )
    from weightloaders.api import (
        plan_load as plan_load,
    )
    from weightloaders.api import (
        safetensors_weights_iterator as safetensors_weights_iterator,
    )
    from weightloaders.api import (
        save_weights as save_weights,
    )
    from weightloaders.comparing import compare as compare
    from weightloaders.hooks import hookimpl as hookimpl
    from weightloaders.llm.llm import LLM as LLM
    from weightloaders.llm.outputs import RequestOutput as RequestOutput
    from weightloaders.llm.outputs import SamplingParams as SamplingParams
    from weightloaders.loaders.base import BaseWeightLoader as BaseWeightLoader
    from weightloaders.loaders.base import Probe as Probe
    from weightloaders.loading import default_weight_loader as default_weight_loader
    from weightloaders.loading import load_status as load_status
    from weightloaders.mapping.rules import Convert as Convert
    from weightloaders.mapping.rules import Drop as Drop
    from weightloaders.mapping.rules import Rename as Rename
    from weightloaders.plan import LoadPlan as LoadPlan
    from weightloaders.provenance import Provenance as Provenance
    from weightloaders.registry import WeightLoaderRegistry as WeightLoaderRegistry
    from weightloaders.report import LoadReport as LoadReport
    from weightloaders.transfer.options import TransferOptions as TransferOptions
    from weightloaders.weights.candidates import Listing as Listing
    from weightloaders.weights.checksum_lists import ChecksumList as ChecksumList
    from weightloaders.weights.checksums import Checksum as Checksum
    from weightloaders.weights.checksums import FileCheck as FileCheck
    from weightloaders.weights.folder import FolderListing as FolderListing
    from weightloaders.weights.info import Extent as Extent
    from weightloaders.weights.info import TensorInfo as TensorInfo
    from weightloaders.weights.source import ByteSource as ByteSource
    from weightloaders.weights.weights import Weights as Weights

# Public name -> the module that defines it.
_HOMES = {
    "BaseWeightLoader": "weightloaders.loaders.base",
    "ByteSource": "weightloaders.weights.source",
    "Checksum": "weightloaders.weights.checksums",
    "ChecksumList": "weightloaders.weights.checksum_lists",
    "Convert": "weightloaders.mapping.rules",
    "Drop": "weightloaders.mapping.rules",
    "Extent": "weightloaders.weights.info",
    "FileCheck": "weightloaders.weights.checksums",
    "FolderListing": "weightloaders.weights.folder",
    "LLM": "weightloaders.llm.llm",
    "Listing": "weightloaders.weights.candidates",
    "LoadPlan": "weightloaders.plan",
    "LoadReport": "weightloaders.report",
    "Probe": "weightloaders.loaders.base",
    "Provenance": "weightloaders.provenance",
    "Rename": "weightloaders.mapping.rules",
    "RequestOutput": "weightloaders.llm.outputs",
    "SamplingParams": "weightloaders.llm.outputs",
    "TensorInfo": "weightloaders.weights.info",
    "TransferOptions": "weightloaders.transfer.options",
    "WeightLoaderRegistry": "weightloaders.registry",
    "Weights": "weightloaders.weights.weights",
    "compare": "weightloaders.comparing",
    "default_weight_loader": "weightloaders.loading",
    "from_pretrained": "weightloaders.api",
    "hookimpl": "weightloaders.hooks",
    "load_into": "weightloaders.api",
    "load_model": "weightloaders.api",
    "load_status": "weightloaders.loading",
    "open_weights": "weightloaders.api",
    "plan_load": "weightloaders.api",
    "safetensors_weights_iterator": "weightloaders.api",
    "save_weights": "weightloaders.api",
}

__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weightloaders' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
