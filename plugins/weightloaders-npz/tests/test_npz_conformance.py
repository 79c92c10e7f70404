"""The suite for loaders, of a `.npz` archive that NumPy writes."""

from __future__ import annotations

import numpy as np
import torch
from weightloaders_npz import NpzLoader

from weightloaders.testing import LoaderConformance


class TestNpz(LoaderConformance):
    loader = NpzLoader
    name = "npz"
    save = staticmethod(np.savez)
    dtypes = frozenset(getattr(torch, str(np.dtype(code))) for code in np.typecodes["AllInteger"] + "?efdFD")

    def write_checkpoint(self, folder, tensors):
        self.save(folder / "model.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
        return folder / "model.npz"


class TestCompressedNpz(TestNpz):
    save = staticmethod(np.savez_compressed)
