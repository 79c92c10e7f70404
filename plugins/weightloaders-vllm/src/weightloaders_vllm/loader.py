"""The model loader that vLLM calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightloaders import LoadReport, Weights
from weightloaders.errors import CoverageError, LoadError, ModelError, SourceError, WeightLoadersError
from weightloaders.loading import load, load_given
from weightloaders.offers import name_of
from weightloaders.transfer.engine import Transferred
from weightloaders.transfer.inspecting import values_of
from weightloaders_vllm.completeness import check_came, check_same, missing_policy, named, shapes_of
from weightloaders_vllm.options import LoadOptions
from weightloaders_vllm.ranks import Ranks
from weightloaders_vllm.reloading import check_written, put_back
from weightloaders_vllm.source import noted, opened, pairs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, MutableMapping

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
        filled: The parameters that the first load filled; none where that was not watched.
        shapes: What its source held; None where that was not told.
    """

    report: LoadReport
    filled: Collection[str]
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
            LoadError: If a tensor does not fit, or another rank could not load its part.
        """
        _refuse_further_sources(model)
        ranks = Ranks()
        with ranks.together():
            self._load(model, model_config, ranks)

    def _load(self, model: nn.Module, model_config: ModelConfig, ranks: Ranks) -> None:
        path, loader = self._place(model_config)
        context = self._options.context(missing_policy(model, self._options.on_missing), ranks=ranks.number)
        context = context.changed(loader=name_of(loader), unite=ranks.unite if ranks.number > 1 else None)
        if not context.rules and not getattr(type(loader).load_weights, "is_default", False):
            # A loader that fills models its own way does so here as well.
            report = load(model, loader, path, context)
            _loaded[model] = _Loaded(report, report.loaded, None)
            return
        with opened(loader, path, context, _config(model_config)) as weights:
            context = context.changed(rules=())
            shapes = shapes_of(weights)
            if not isinstance(weights, Weights):
                weights, shapes = noted(weights)
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
            _loaded[model] = _Loaded(report, report.loaded if watched else (), shapes)
        logger.info("%s: %d parameters in %.2f seconds", path, len(report.loaded), report.seconds)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """What `reload_weights` fills a running model from.

        What the source holds is looked at before vLLM takes the model apart. Of tensors that come one by one it is told
        when they have come.

        Raises:
            PlanError: If it lacks something that the model was loaded from; nothing was changed.
            SourceError: If it can't be opened.
            LoadError: While it is iterated over, if something is amiss that was not known before.
        """
        put_back(model)
        path, loader = self._place(model_config)
        context = self._options.context(ranks=Ranks().number).changed(loader=name_of(loader))
        source = opened(loader, path, context, _config(model_config))
        weights = source.__enter__()
        try:
            before, shapes = _loaded.get(model), shapes_of(weights)
            if self._options.watch and shapes is not None and before is not None and before.shapes is not None:
                check_same(before.shapes, shapes, path)
            if context.verify.sha256 and isinstance(weights, Weights):
                context.verify.check_files(weights.infos(), weights.described_by)
        except BaseException:
            source.__exit__(None, None, None)
            raise
        return self._reloaded(source, weights, model, context, path)

    def _reloaded(
        self, source: Any, weights: Any, model: nn.Module, context: LoadContext, path: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        start, moved = time.perf_counter(), Transferred()
        shapes: dict[str, tuple[int, ...]] = {}
        before = _loaded.get(model)
        try:
            for name, tensor in pairs(weights, context, moved):
                if context.verify.finite:
                    _check_finite(name, tensor)
                shapes[name] = tuple(tensor.shape)
                yield name, tensor
                del tensor
            if self._options.watch and before is not None:
                check_written(model, before.filled)
                if before.shapes is not None:
                    check_came(before.shapes, shapes, path)
        except SourceError as error:
            put_back(model)
            raise LoadError.of(error, ()) from error
        except LoadError:
            put_back(model)
            raise
        finally:
            source.__exit__(None, None, None)
        report = LoadReport(
            loaded=list(shapes), loader=context.loader, bytes_read=moved.bytes_read, extra_memory=moved.extra_memory,
            seconds=time.perf_counter() - start, decided_by=["vLLM's reload"],
        )  # fmt: skip
        _loaded[model] = _Loaded(report, () if before is None else before.filled, shapes)

    def _place(self, model_config: ModelConfig) -> tuple[str, BaseWeightLoader]:
        """Where the weights lie, and who reads them."""
        elsewhere = model_config.model_weights
        path = elsewhere or model_config.model
        return path, self._options.create_loader(path, None if elsewhere else model_config.revision)


def _refuse_further_sources(model: nn.Module) -> None:
    further = [source.model_or_path for source in getattr(model, "secondary_weights", ())]
    if further:
        raise ModelError(
            f"{type(model).__name__} takes weights from further sources as well ({', '.join(map(repr, further))}), "
            "which this load format does not open",
            hint="use one of vLLM's own load formats for it",
        )


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
