"""Writing weights in another layout than they have: back in the checkpoint's own, or as rules say."""

from weightloaders.saving.arranging import arrange, rearranged
from weightloaders.saving.gathering import cast, gathered, in_files
from weightloaders.saving.inverting import invert_origin
from weightloaders.saving.layout import checkpoint_layout

__all__ = ["arrange", "cast", "checkpoint_layout", "gathered", "in_files", "invert_origin", "rearranged"]
