"""The loader ``dummy``: seeded random values of the right shapes, for profiling a model without its weights."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from weightloaders.errors import ModelError, OptionsError, SourceNotFoundError
from weightloaders.loaders.base import BaseWeightLoader
from weightloaders.weights.folder import path_of

if TYPE_CHECKING:
    import torch

    from weightloaders.weights.weights import Weights

CONFIG_FILE = "config.json"


class DummyLoader(BaseWeightLoader):
    """Random values in the shapes of a transformers model, which is known by its config alone.

    A value depends on the seed and the tensor's name, not on the order of reading: each run, and each process of one,
    gets the same. Tied parameters are given once. Parameters are normally distributed around zero; floating-point
    buffers are positive (a variance must be), other buffers zero.

    Args:
        seed: Another seed gives other values.
        std: Standard deviation of the parameters.
        dtype: What floating-point parameters are handed out in. None: what the config says.

    Raises:
        OptionsError: If ``std`` is negative, or ``dtype`` not one that values are cast to.
    """

    description: ClassVar[str] = "seeded random values in the shapes that a transformers config implies"

    def __init__(self, seed: int = 0, std: float = 0.02, dtype: torch.dtype | str | None = None) -> None:
        from weightloaders.weights.raw import dtype_option

        if not std >= 0:
            raise OptionsError(f"std must be 0 or more, not {std!r}")
        self.seed = seed
        self.std = std
        self.dtype = None if dtype is None else dtype_option(dtype, "dtype", real=True)

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Describe the state dict of the model that a config describes.

        Args:
            model_name_or_path: A folder with a ``config.json``, a file in such a folder, or a repository of the hub.

        Raises:
            SourceNotFoundError: If there is no config.
            ModelError: If transformers can't build a model from it.
        """
        import torch

        from weightloaders.weights.info import TensorInfo
        from weightloaders.weights.weights import Weights

        model = _meta_model(model_name_or_path, self.dtype)
        infos: dict[int, TensorInfo] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            # Parameters that are tied are one object; a checkpoint holds them once, under the first name.
            if isinstance(tensor, torch.Tensor) and id(tensor) not in infos:
                shape, dtype = tuple(tensor.shape), tensor.dtype
                std = self.std if isinstance(tensor, torch.nn.Parameter) else None
                read = partial(_values, f"{self.seed}:{name}", shape, dtype, std)
                infos[id(tensor)] = TensorInfo(name, dtype, shape, read=read)
        return Weights.describe(
            infos.values(), notes=[f"random values (seed {self.seed}), not weights: the outputs mean nothing"]
        )


def _meta_model(path: str, dtype: torch.dtype | None) -> torch.nn.Module:
    import torch
    import transformers

    place = path_of(path)
    folder = place.parent if os.path.isfile(place) else place  # noqa: PTH113 -- `Path` fails for a name that is too long
    is_local = os.path.isdir(folder)  # noqa: PTH112
    if is_local and not (folder / CONFIG_FILE).is_file():
        raise SourceNotFoundError(
            f"there is no {CONFIG_FILE} in {folder}, so the shapes of the model are unknown",
            file=folder,
            hint="random weights are made for a transformers model, whose folder or repository holds its config",
        )
    source = str(folder) if is_local else path
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise SourceNotFoundError(f"no transformers config can be had from {path}: {error}", file=path) from error
    except Exception as error:
        raise ModelError(f"the config of {path} can't be used: {error}", file=path) from error
    model_class = _model_class(config, path)
    try:
        with torch.device("meta"):
            model: torch.nn.Module = model_class._from_config(config, **({} if dtype is None else {"dtype": dtype}))  # noqa: SLF001
    except Exception as error:
        raise ModelError(
            f"{model_class.__name__} can't be built from the config of {path}: {type(error).__name__}: {error}",
            file=path,
        ) from error
    return model


def _model_class(config: Any, path: str) -> Any:
    import transformers

    named = list(config.architectures or [])
    for name in named:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    if named:
        raise ModelError(
            f"the config of {path} is of {', '.join(named)}: unknown to transformers {transformers.__version__}",
            file=path,
            hint="update transformers; code that a repository brings along is not run here",
        )
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        model_class = auto._model_mapping.get(type(config), None)  # noqa: SLF001 -- what `from_config` itself asks
        if model_class is not None:
            return model_class[0] if isinstance(model_class, tuple | list) else model_class
    raise ModelError(
        f"the config of {path} names no architecture, and none is known for {type(config).__name__}", file=path
    )


def _values(seed: str, shape: tuple[int, ...], dtype: torch.dtype, std: float | None) -> torch.Tensor:
    """A tensor that the seed determines: normal with a standard deviation, or what a buffer can bear."""
    import torch

    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest()))
    # In float32 whatever the dtype: 8-bit floats have no generator of their own, and the values agree across dtypes.
    # Whatever default device and dtype the user has set.
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    values = values.uniform_(generator=generator) if std is None else values.normal_(0.0, std, generator=generator)
    return values.to(dtype)
