"""``weightloaders convert SRC DST``: the same weights in another format."""

from __future__ import annotations

import json
import os
import shutil
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightloaders.cli.common import Loader, Option, Source, loader_options, remark, settings
from weightloaders.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from weightloaders.progress import Progress
    from weightloaders.weights.weights import Weights

# What makes a folder of weights a model: config, tokenizer, chat template, code. An index belongs to the old weights.
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
_NOT_COPIED = ("meta.txt", "trainer_state.json")
_MAX_CONFIG_BYTES = 1 << 24


class Format(StrEnum):
    """What can be written."""

    SAFETENSORS = "safetensors"
    BINARY = "binary"


def convert_source(
    source: Source,
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="A new folder, or a new .safetensors file.", show_default=False)
    ],
    to: Annotated[Format, typer.Option(help="What to write.", show_default=False)],
    loader: Loader = "auto",
    option: Option = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cast floating-point tensors, e.g. to bfloat16."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest safetensors file, e.g. 500MB.")] = "5GB",
) -> None:
    """Write the weights of SRC in another format, with the config and tokenizer files that lie beside them.

    One tensor is in memory at a time. DST appears once it is complete; nothing that exists is replaced.
    """
    from weightloaders.api import open_to_read, parse_size
    from weightloaders.progress import Progress
    from weightloaders.weights.atomic import made_folder
    from weightloaders.weights.raw import RawFolder, dtype_option
    from weightloaders.weights.safetensors import SafetensorsFolder, write_safetensors

    target = _at_home(destination)
    wanted = None if dtype is None else dtype_option(dtype, "--dtype", real=True)
    shard_bytes = parse_size(max_shard_size)
    _check_free(target)
    companions = _companions(_at_home(source), wanted)
    with open_to_read(source, loader, **loader_options(option)) as opened, Progress(settings.progress) as progress:
        weights = _cast(opened, wanted)
        read = _counted(weights, progress)
        if to is Format.SAFETENSORS and target.suffix == ".safetensors":
            with made_folder(target.parent):
                write_safetensors(target, weights.infos(), read, {"format": "pt"})
        else:
            draft = (
                SafetensorsFolder(target, weights.infos(), max_shard_size=shard_bytes)
                if to is Format.SAFETENSORS
                else RawFolder(target, weights.infos())
            )
            with _appearing(target) as stage:
                draft.write(stage, read)
                _copy(companions, stage, target)
    if not settings.quiet:
        remark(f"{len(weights):,} tensors, {weights.nbytes:,} bytes, in {target}")


def _at_home(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- `Path.expanduser` fails where there is no such home


def _cast(weights: Weights, dtype: torch.dtype | None) -> Weights:
    """The same weights with their real numbers in another dtype."""
    from weightloaders.mapping.dtypes import may_cast
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.weights import Weights

    if dtype is None:
        return weights
    return Weights.describe(
        TensorInfo(info.name, dtype, info.shape, read=partial(_cast_tensor, weights, info.name, dtype))
        if may_cast(info.dtype, dtype)
        else info
        for info in weights.infos()
    )


def _cast_tensor(weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = weights[name]
    result = tensor.to(dtype)
    if bool(result.isinf().any()) and not bool(tensor.isinf().any()):
        raise SaveError(
            f"tensor {name!r} has values that {dtype} has no room for: they would become infinite",
            tensor=name,
            hint="bfloat16 has the range of float32",
        )
    return result


def _counted(weights: Weights, progress: Progress) -> Callable[[str], torch.Tensor]:
    """Reads tensors by name, and tells how far it has come."""
    from weightloaders.transfer.engine import ProgressEvent

    total, done = weights.nbytes, 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        tensor = weights[name]
        done += tensor.nbytes
        progress(ProgressEvent(done, total))
        return tensor

    return read


def _check_free(target: Path) -> None:
    from weightloaders.weights.atomic import saving

    with saving(target):
        if target.is_dir() and not target.is_symlink():
            if any(target.iterdir()):
                raise SaveError(
                    f"{target} is a folder with something in it", file=target, hint="name a new or an empty folder"
                )
        elif target.exists() or target.is_symlink():
            raise SaveError(f"{target} exists already", file=target, hint="name another, or remove it first")


def _appearing(target: Path) -> AbstractContextManager[Path]:
    """A folder to write into; what is in it appears at ``target`` when the block ends well, else nothing does."""
    from weightloaders.weights.atomic import new_folder, replaced_files

    # An empty folder stays what it is: it may be one that can't be exchanged, such as a volume's.
    return replaced_files(target, lambda _: False) if target.is_dir() else new_folder(target)


def _companions(source: Path, dtype: torch.dtype | None) -> dict[str, Path | str]:
    """What comes along, by name: files to copy, or the text of one that changes. Read before anything is written."""
    from weightloaders.weights.texts import read_text

    found: dict[str, Path | str] = {}
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        name = file.name.lower()
        if not name.endswith(_COPIED) or name in _NOT_COPIED or ".index." in name or not file.is_file():
            continue
        found[file.name] = file
        if name == "config.json" and dtype is not None:
            text = read_text(file, _MAX_CONFIG_BYTES)
            try:
                config = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise SaveError(f"can't change the dtype in {file}: it is no JSON: {error}", file=file) from error
            changed = _with_dtype(config, str(dtype).removeprefix("torch."))
            found[file.name] = json.dumps(changed, indent=2) + "\n"
    return found


def _copy(companions: dict[str, Path | str], stage: Path, target: Path) -> None:
    from weightloaders.weights.atomic import saving

    for name, content in companions.items():
        # What was written of the weights counts rather.
        if (stage / name).exists():
            continue
        with saving(target / name):
            if isinstance(content, Path):
                shutil.copyfile(content, stage / name)
            else:
                (stage / name).write_text(content, encoding="utf-8")


def _with_dtype(config: Any, dtype: str) -> Any:
    """A config that says the new dtype wherever it said the old one: loaders go by it."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in config.items()
    }
