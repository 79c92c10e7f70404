"""`LoaderConformance`: what every loader must do, as tests to inherit."""

from __future__ import annotations

from weightloaders.testing.conformance.damage import Damage
from weightloaders.testing.conformance.options import Options
from weightloaders.testing.conformance.package import Package
from weightloaders.testing.conformance.reading import Reading
from weightloaders.testing.conformance.sharing import Sharing
from weightloaders.testing.conformance.values import Values


class LoaderConformance(Values, Reading, Damage, Sharing, Options, Package):
    """What every loader must do.

    Inherit it in a test module, say which loader, and write a checkpoint::

        class TestNpz(LoaderConformance):
            loader = NpzLoader
            dtypes = {torch.float32, torch.float16}  # what the format can hold

            def write_checkpoint(self, folder, tensors):
                np.savez(folder / "model.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
                return folder / "model.npz"

    Each method ``test_*`` is a test for pytest. What is declared in attributes must be true: a declared dtype is read
    to the last bit, one that is not declared is refused, by the writer or by the loader. A check that can't be asked of
    a format is switched off by name: ``test_truncated_files_are_refused = None``.
    """
