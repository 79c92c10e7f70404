"""llama.cpp's GGUF files for weightloaders."""

from weightloaders_gguf.loader import GgufLoader as GgufLoader
