"""Writing weights in another layout than they have: back in the checkpoint's own, or as rules say."""

from weightloaders.saving.arranging import arrange, laid_out_like, rearranged
from weightloaders.saving.gathering import cast
from weightloaders.saving.layout import checkpoint_layout

__all__ = ["arrange", "cast", "checkpoint_layout", "laid_out_like", "rearranged"]
