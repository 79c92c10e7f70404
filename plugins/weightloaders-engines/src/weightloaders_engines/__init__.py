"""Other libraries' ways to read weights as loaders: tensorizer, the Run:ai model streamer, fastsafetensors."""

from weightloaders_engines.fast_safetensors import FastSafetensorsLoader as FastSafetensorsLoader
from weightloaders_engines.run_ai import RunAiLoader as RunAiLoader
from weightloaders_engines.tensorized import TensorizerLoader as TensorizerLoader
