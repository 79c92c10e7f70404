"""`MetaLoader` against the suite that every loader has to pass."""

from __future__ import annotations

import torch
from weightloaders_meta import MetaLoader

from weightloaders.testing import LoaderConformance


class TestMeta(LoaderConformance):
    loader = MetaLoader
    name = "meta"

    def write_checkpoint(self, folder, tensors):
        torch.save(dict(tensors), folder / "consolidated.00.pth")
        (folder / "params.json").write_text('{"dim": 8, "n_heads": 2, "norm_eps": 1e-5}')
        return folder
