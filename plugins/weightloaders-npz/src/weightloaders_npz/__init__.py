"""NumPy's ``.npz`` archives for weightloaders."""

from weightloaders_npz.loader import NpzLoader as NpzLoader
