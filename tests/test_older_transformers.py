"""What older versions of transformers, which plain checkpoints are fine with, can't do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from weightloaders import from_pretrained, load_into
from weightloaders.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], "dequantize": True}


@pytest.fixture
def before_5_21(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a newer version: what an older one lacks is taken away."""
    for quantizer in (HfQuantizer, FineGrainedFP8HfQuantizer):
        monkeypatch.delattr(quantizer, "get_load_operations", raising=False)


@pytest.mark.usefixtures("before_5_21")
def test_a_quantised_checkpoint_is_refused_with_the_version_that_it_needs(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    load_into(model, tmp_path, progress=False)
    needed = f"quantised with fp8 need transformers 5.21 or newer, and this is {transformers.__version__}\n.*upgrade"

    config.quantization_config = FP8
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=needed):
        from_pretrained(tmp_path, progress=False)
    # A model that transformers itself filled from such a checkpoint.
    model.hf_quantizer = FineGrainedFP8HfQuantizer(
        transformers.FineGrainedFP8Config(weight_block_size=(16, 16)), pre_quantized=True
    )
    before = model.lm_head.weight.clone()
    with pytest.raises(ModelError, match=needed):
        load_into(model, tmp_path, progress=False)
    assert torch.equal(model.lm_head.weight, before)
