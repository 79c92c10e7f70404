"""Loaders for tests that name one as vLLM's processes are told of it: ``"vllm_loaders:Class"``."""

from __future__ import annotations

from typing import ClassVar

import torch

from weightloaders import BaseWeightLoader

WHOLE = {"q.weight": torch.ones(4, 4), "k.weight": torch.full((4, 4), 2.0)}


class Misbehaving(BaseWeightLoader):
    """Yields what it is told to."""

    pairs: ClassVar[list] = []

    def get_weights(self, model_name_or_path):
        for pair in self.pairs:
            if isinstance(pair, Exception):
                raise pair
            yield pair


class Halfway(BaseWeightLoader):
    """Fills models its own way, and only half."""

    def get_weights(self, model_name_or_path):
        return dict(WHOLE)

    def load_weights(self, model, weights):
        return model.load_weights([("q.weight", weights["q.weight"])])
