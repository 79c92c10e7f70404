"""What vLLM's workers can be asked besides, for the facade: see vLLM's ``worker_extension_cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightloaders.errors import LoadError, WeightLoadersError, summary

if TYPE_CHECKING:
    from weightloaders import LoadReport


class WorkerExtension:
    """Mixed into vLLM's worker class. Answers cross process borders, so they are plain values and JSON."""

    # What vLLM's worker has.
    if TYPE_CHECKING:
        vllm_config: Any
        get_model: Any
        reload_weights: Any

    def weightloaders_report(self) -> str | None:
        """What the last load did; None where somebody else did it."""
        from weightloaders_vllm.loader import report_of

        report: LoadReport | None = report_of(self.get_model())
        return None if report is None else report.to_json()

    def weightloaders_reload(self, path: str, load_format: str, extra: dict[str, Any]) -> dict[str, Any]:
        """Fill the model again, in place, perhaps by another loader.

        Returns:
            ``{"report": ...}``, or ``{"error": ..., "changed": whether the model is no more what it was}``.
        """
        from weightloaders_vllm.reloading import put_back

        load_config, model_config = self.vllm_config.load_config, self.vllm_config.model_config
        places = "model", "model_weights", "revision"
        before = {name: getattr(model_config, name) for name in places}
        asked = load_config.load_format, load_config.model_loader_extra_config
        load_config.load_format, load_config.model_loader_extra_config = load_format, extra
        try:
            self.reload_weights(weights_path=path)
        except Exception as error:  # noqa: BLE001 -- whatever vLLM raised, the other side is told
            put_back(self.get_model())
            load_config.load_format, load_config.model_loader_extra_config = asked
            for name, value in before.items():
                setattr(model_config, name, value)
            is_ours = isinstance(error, WeightLoadersError)
            return {
                "error": str(error) if is_ours else summary(error),
                "changed": not is_ours or isinstance(error, LoadError),
            }
        return {"report": self.weightloaders_report()}
