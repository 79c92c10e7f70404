"""Word embeddings that a model's config ties, against what the checkpoint has.

vLLM looks for an ``lm_head`` itself, but only in safetensors beside the config; see ``maybe_untie_word_embeddings`` in
its ``vllm/config/model.py``. The weights may lie elsewhere, or in another format.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.model_loader import weight_tying

from weightloaders.errors import CoverageError

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from weightloaders import Weights
    from weightloaders.plan import Policies

logger = logging.getLogger(f"vllm.{__name__}")

_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def settle_ties(model: nn.Module, model_config: ModelConfig, weights: Weights, policies: Policies) -> None:
    """Tie what the source has once; refuse to tie what it has twice, and different.

    Args:
        model: Built, and not yet filled.
        model_config: vLLM's.
        weights: What it is to be filled from.
        policies: Says what is done about values that the model would not take.

    Raises:
        CoverageError: If the model would leave out an output layer that is not its embeddings.
    """
    heads = [name for name in weights if name.endswith(_HEAD)]
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False) and not heads:
        # There is one in the folder of the config, but that is not where the weights come from.
        untied = weight_tying._get_untied_lm_head(model)  # noqa: SLF001 -- vLLM has no other word for it
        if untied is not None:
            untied.tie(model)
    embeddings = [name for name in weights if name.endswith(_EMBEDDINGS)]
    is_tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
    if not is_tied or len(heads) != 1 or len(embeddings) != 1:
        return
    head, embedding = weights[heads[0]], weights[embeddings[0]]
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return
    message = f"the config ties the word embeddings, but {heads[0]!r} is not {embeddings[0]!r}, and would be left out"
    if policies.mismatched(heads[0]) == "error":
        raise CoverageError(
            message,
            tensor=heads[0],
            hint="set tie_word_embeddings to false: hf_overrides={'tie_word_embeddings': False}",
        )
    logger.warning("%s", message)
