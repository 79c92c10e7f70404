"""Meta's own names and layouts of Llama weights for weightloaders."""

from weightloaders_meta.loader import MetaLoader as MetaLoader
