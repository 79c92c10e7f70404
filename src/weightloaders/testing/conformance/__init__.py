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

    Each method ``test_*`` is a test for pytest. What is declared in the attributes must be true: a declared dtype is
    read to the last bit; one that is not declared is refused, by the writer or by the loader. A check that can't be
    asked of a format is switched off by its name: ``test_truncated_files_are_refused = None``.

    Attributes:
        loader: The loader: a name, a class, a factory or an instance.
        options: Options that each load of the suite is given.
        dtypes: What the format can hold, bit for bit. Default: whatever safetensors can, and complex128.
        min_dims: The fewest dimensions that a tensor of the format has: 0 (the default), 1 or 2.
        max_dims: The most: 2 or more. Default: 8.
        holds_empty: Whether the format can hold tensors without elements. Default: yes.
        names: Names of tensors that the format can hold. Default: long, dotted, with spaces, of several alphabets.
        lazy: Whether the loader says what there is without reading the values. Default: yes. One that returns a dict,
            or pairs, can't.
        recognised: Whether the loader's `probe`, where it has one, recognises what it reads, so that it need not be
            named. Default: yes.
        name: The name that an installed package offers the loader under. Default: whatever name leads to it, if any.
        heavy: Modules that importing the loader's own must not import. Default: torch, transformers, numpy.
        patience: Seconds after which reading a tiny file counts as hanging. Default: 20.
    """
