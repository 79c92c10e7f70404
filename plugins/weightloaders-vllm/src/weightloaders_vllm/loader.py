"""The model loader that vLLM calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightloaders import LoadReport, Weights
from weightloaders.errors import CoverageError, LoadError, PlanError, SourceError, WeightLoadersError
from weightloaders.loading import load, load_given
from weightloaders.offers import name_of
from weightloaders.transfer.engine import Transferred
from weightloaders.transfer.inspecting import values_of
from weightloaders_vllm.completeness import check_same, missing_policy, named, shapes_of
from weightloaders_vllm.options import LoadOptions
from weightloaders_vllm.source import opened, pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    import torch
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig

    from weightloaders import BaseWeightLoader
    from weightloaders.loading import LoadContext

# Below `vllm`, so that vLLM's own settings for its log hold.
logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class _Loaded:
    """What is remembered of a model's last load.

    Attributes:
        report: What it did.
        shapes: What its source held; None where there was no catalogue.
    """

    report: LoadReport
    shapes: Mapping[str, tuple[int, ...]] | None


_loaded: MutableMapping[nn.Module, _Loaded] = WeakIdKeyDictionary()


def report_of(model: nn.Module) -> LoadReport | None:
    """What the last load of a vLLM model did, in the process where the model is."""
    loaded = _loaded.get(model)
    return None if loaded is None else loaded.report


class WeightLoadersModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM need not be installed
    """Fills vLLM's models through any loader of weightloaders. vLLM makes one, and may make several.

    Args:
        load_config: vLLM's; its ``model_loader_extra_config`` has the keys of `LoadOptions`.

    Raises:
        ConfigError: If they can't be used.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = LoadOptions.of(load_config.load_format, load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: what has to be fetched is fetched when it is opened."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill a model that was just built, and refuse what leaves it incomplete.

        Raises:
            SourceError: If the source can't be opened.
            CoverageError: If something was left unfilled, or cut to fit.
            LoadError: If a tensor does not fit.
        """
        path, loader = self._place(model_config)
        context = self._options.context(missing_policy(model, self._options.on_missing))
        context = context.changed(loader=name_of(loader))
        if not context.rules and not getattr(type(loader).load_weights, "is_default", False):
            # A loader that fills models its own way does so here as well.
            _loaded[model] = _Loaded(load(model, loader, path, context), None)
            return
        with opened(loader, path, context, _config(model_config)) as weights:
            context = context.changed(rules=())
            watched = self._options.watch and not any(parameter.is_meta for parameter in model.parameters())
            if watched:
                try:
                    report = load_given(model, weights, context)
                except CoverageError as error:
                    raise named(error, model, weights) from error
            else:
                if self._options.watch:
                    logger.warning("vLLM quantises this model while it is loaded, so what is written can't be watched")
                report = _unwatched(model, weights, context)
            _loaded[model] = _Loaded(report, shapes_of(weights))
        logger.info("%s: %d parameters in %.2f seconds", path, len(report.loaded), report.seconds)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """What `reload_weights` fills a running model from.

        What the source holds is looked at before vLLM takes the model apart.

        Raises:
            PlanError: If it lacks something that the model was loaded from; nothing was changed.
            SourceError: If it can't be opened.
        """
        path, loader = self._place(model_config)
        context = self._options.context().changed(loader=name_of(loader))
        source = opened(loader, path, context, _config(model_config))
        weights = source.__enter__()
        try:
            before, shapes = _loaded.get(model), shapes_of(weights)
            if self._options.watch and before is not None and before.shapes is not None:
                if shapes is None:
                    raise PlanError(
                        f"{path} yields tensors one by one, so it is not known whether all are there that the model "
                        "was loaded from; nothing was changed",
                        hint="model_loader_extra_config={'watch': False} does without",
                    )
                check_same(before.shapes, shapes, path)
            if context.verify.sha256 and isinstance(weights, Weights):
                context.verify.check_files(weights.infos(), weights.described_by)
        except BaseException:
            source.__exit__(None, None, None)
            raise
        return self._reloaded(source, weights, model, context)

    def _reloaded(
        self, source: Any, weights: Any, model: nn.Module, context: LoadContext
    ) -> Iterator[tuple[str, torch.Tensor]]:
        start, moved, names = time.perf_counter(), Transferred(), []
        try:
            for name, tensor in pairs(weights, context, moved):
                if context.verify.finite:
                    _check_finite(name, tensor)
                names.append(name)
                yield name, tensor
                del tensor
        except SourceError as error:
            raise LoadError.of(error, ()) from error
        finally:
            source.__exit__(None, None, None)
        report = LoadReport(
            loaded=names, loader=context.loader, bytes_read=moved.bytes_read, extra_memory=moved.extra_memory,
            seconds=time.perf_counter() - start, decided_by=["vLLM's reload"],
        )  # fmt: skip
        _loaded[model] = _Loaded(report, shapes_of(weights) if isinstance(weights, Weights) else None)

    def _place(self, model_config: ModelConfig) -> tuple[str, BaseWeightLoader]:
        """Where the weights lie, and who reads them."""
        elsewhere = model_config.model_weights
        path = elsewhere or model_config.model
        return path, self._options.create_loader(path, None if elsewhere else model_config.revision)


def _config(model_config: ModelConfig) -> dict[str, Any]:
    return dict(model_config.hf_text_config.to_dict())


def _unwatched(model: Any, weights: Any, context: LoadContext) -> LoadReport:
    start, moved = time.perf_counter(), Transferred()
    if context.verify.sha256 and isinstance(weights, Weights):
        context.verify.check_files(weights.infos(), weights.described_by)
    try:
        loaded = model.load_weights(pairs(weights, context, moved))
    except WeightLoadersError:
        raise
    except Exception as error:
        raise LoadError(f"{type(model).__name__}.load_weights failed: {error}") from error
    return LoadReport(
        loaded=sorted(loaded or ()), loader=context.loader, bytes_read=moved.bytes_read,
        extra_memory=moved.extra_memory, seconds=time.perf_counter() - start,
    )  # fmt: skip


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    odd = values_of(tensor, checksum=False).not_finite
    if odd is not None:
        raise LoadError(f"{name!r} holds NaN or infinite values: {odd}", tensor=name)
