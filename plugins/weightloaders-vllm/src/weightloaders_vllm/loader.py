"""The model loader that vLLM calls."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightloaders import LoadReport, Weights
from weightloaders.errors import LoadError, ModelError, PlanError, SourceError, WeightLoadersError, summary
from weightloaders.loading import handed_pairs, load, load_given
from weightloaders.offers import name_of
from weightloaders.plan import listed
from weightloaders.transfer.engine import Transferred
from weightloaders.transfer.inspecting import values_of
from weightloaders_vllm.behind import named, place_of
from weightloaders_vllm.completeness import check_came, check_same, contents_of, missing_policy, optional
from weightloaders_vllm.options import LoadOptions
from weightloaders_vllm.ranks import Ranks
from weightloaders_vllm.reloading import check_written, put_back
from weightloaders_vllm.source import noted, opened
from weightloaders_vllm.ties import settle_ties

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, MutableMapping

    import torch
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig

    from weightloaders import BaseWeightLoader
    from weightloaders.loading import LoadContext
    from weightloaders.weights.weights import Stream
    from weightloaders_vllm.completeness import Contents, Held

# Below `vllm`, so that vLLM's own settings for its log hold.
logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class _Loaded:
    """What is remembered of a model's last load.

    Attributes:
        report: What it did.
        filled: The parameters that the first load filled; none where that was not watched.
        contents: What its source held; None where that was not told.
    """

    report: LoadReport
    filled: Collection[str]
    contents: Contents | None


_loaded: MutableMapping[nn.Module, _Loaded] = WeakIdKeyDictionary()
# The last reload that was begun.
_reloads: MutableMapping[nn.Module, object] = WeakIdKeyDictionary()


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
        need_not_be = optional(model)
        policy = missing_policy(need_not_be, self._options.on_missing)
        context = self._options.context(policy)
        context = context.changed(loader=name_of(loader), unite=ranks.unite if ranks.number > 1 else None)
        if not context.rules and not getattr(type(loader).load_weights, "is_default", False):
            # A loader that fills models its own way does so here as well.
            with _named(model, None):
                report = load(model, loader, path, context)
            _loaded[model] = _Loaded(report, report.loaded, None)
        else:
            report = self._fill(model, model_config, loader, path, context)
        report.missing = [name for name in report.missing if name not in need_not_be]
        logger.info("%s: %d parameters in %.2f seconds", path, len(report.loaded), report.seconds)

    def _fill(
        self, model: nn.Module, model_config: ModelConfig, loader: BaseWeightLoader, path: str, context: LoadContext
    ) -> LoadReport:
        with opened(loader, path, context, _config(model_config)) as weights:
            context = context.changed(rules=())
            contents = contents_of(weights)
            if isinstance(weights, Weights):
                settle_ties(model, model_config, weights, context.policies)
            else:
                weights, contents = noted(weights)
            watched = self._options.watch and not any(parameter.is_meta for parameter in model.parameters())
            if self._options.watch and not watched:
                logger.warning("vLLM quantises this model while it is loaded, so what is written can't be watched")
            with _named(model, contents):
                report = (load_given if watched else _unwatched)(model, weights, context)
        # What the model did not use need not be there the next time.
        used = {name: held for name, held in (contents or {}).items() if name not in report.unexpected}
        _loaded[model] = _Loaded(report, report.loaded if watched else (), used)
        return report

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
        context = self._options.context().changed(loader=name_of(loader))
        before = _loaded.get(model)
        known = before.contents if self._options.watch and before is not None else None
        source = opened(loader, path, context, _config(model_config))
        weights = source.__enter__()
        try:
            contents = contents_of(weights)
            if known is not None and contents is not None:
                check_same(known, contents, path)
                for name in contents:
                    self._check_new(model, name, known, context)
            if context.verify.sha256 and isinstance(weights, Weights):
                context.verify.check_files(weights.infos(), weights.described_by)
        except BaseException:
            source.__exit__(None, None, None)
            raise
        return self._reloaded(source, weights, model, context, path)

    def _check_new(self, model: nn.Module, name: str, known: Collection[str], context: LoadContext) -> bool:
        """Whether a tensor is to be handed over in a reload.

        One that the first load had not, and the model has no place for, would end vLLM's reload half-way.
        """
        if name in known or place_of(model, name) is not None:
            return True
        said = f"{name!r} was not there when the model was first loaded, and it has no parameter for it"
        if context.policies.unexpected(name) == "error":
            raise PlanError(said, tensor=name, hint="leave it out by rules, or reload from a checkpoint of this model")
        return False

    def _reloaded(
        self, source: Any, weights: Any, model: nn.Module, context: LoadContext, path: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        start, moved = time.perf_counter(), Transferred()
        came: dict[str, Held] = {}
        unexpected: list[str] = []
        before = _loaded.get(model)
        known = before.contents if self._options.watch and before is not None else None
        reload = _reloads[model] = object()
        is_done = False
        try:
            for name, tensor in handed_pairs(weights, context.transfer, moved, lambda _: None):
                if known is not None and not self._check_new(model, name, known, context):
                    unexpected.append(name)
                    continue
                held = tuple(tensor.shape), tensor.dtype
                if known is not None and name in known:
                    check_came({name: known[name]}, {name: held}, path)
                if context.verify.finite:
                    _check_finite(name, tensor)
                came[name] = held
                yield name, tensor
                del tensor
            if self._options.watch and before is not None:
                check_written(model, before.filled)
            if known is not None:
                check_came(known, came, path)
            is_done = True
        except LoadError:
            raise
        except WeightLoadersError as error:
            raise LoadError.of(error, ()) from error
        finally:
            source.__exit__(None, None, None)
            # One that was given up may be told so late that the next has begun.
            if not is_done and _reloads.get(model) is reload:
                put_back(model)
        if unexpected:
            logger.warning("the reload left out %d tensors that the model has no place for: %s",
                           len(unexpected), listed(unexpected))  # fmt: skip
        report = LoadReport(
            loaded=list(came), loader=context.loader, bytes_read=moved.bytes_read, extra_memory=moved.extra_memory,
            seconds=time.perf_counter() - start, decided_by=["vLLM's reload"], unexpected=unexpected,
        )  # fmt: skip
        _loaded[model] = _Loaded(report, () if before is None else before.filled, came)

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


@contextlib.contextmanager
def _named(model: nn.Module, there: Collection[str] | None) -> Iterator[None]:
    """An error of the block names both the checkpoint's tensors and the model's parameters."""
    try:
        yield
    except LoadError as error:
        raise named(error, model, there) from error


def _unwatched(model: Any, weights: Weights | Stream, context: LoadContext) -> LoadReport:
    start, moved = time.perf_counter(), Transferred()
    if context.verify.sha256 and isinstance(weights, Weights):
        context.verify.check_files(weights.infos(), weights.described_by)
    last: list[str] = []

    def noting() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in handed_pairs(weights, context.transfer, moved, lambda _: None):
            last[:] = [name]
            yield name, tensor
            del tensor

    try:
        loaded = model.load_weights(noting())
    except SourceError as error:
        raise LoadError.of(error, ()) from error
    except WeightLoadersError:
        raise
    except Exception as error:
        at = f" at the tensor {last[0]!r}" if last else ""
        who = f"{type(model).__name__}.load_weights"
        raise LoadError(f"{who} failed{at}: {summary(error)}", tensor=last[0] if last else None, plugin=who) from error
    return LoadReport(
        loaded=sorted(loaded or ()), loader=context.loader, bytes_read=moved.bytes_read,
        extra_memory=moved.extra_memory, seconds=time.perf_counter() - start,
    )  # fmt: skip


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    odd = values_of(tensor, checksum=False).not_finite
    if odd is not None:
        raise LoadError(f"{name!r} holds NaN or infinite values: {odd}", tensor=name)
