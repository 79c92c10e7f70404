"""``weightloaders convert SRC DST``: the same weights in another format."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightloaders.cli.common import Loader, Option, Source, loader_options, remark, settings
from weightloaders.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from weightloaders.progress import Progress
    from weightloaders.weights.weights import Weights

# What makes a folder of weights a model: config, tokenizer, chat template, code. An index belongs to the old weights.
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
_NOT_COPIED = ("meta.txt", "trainer_state.json")


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
    from weightloaders.api import open_weights, parse_size
    from weightloaders.progress import Progress
    from weightloaders.weights.raw import dtype_option, write_raw
    from weightloaders.weights.safetensors import write_safetensors, write_sharded

    target = Path(destination).expanduser()
    wanted = None if dtype is None else dtype_option(dtype, "--dtype", real=True)
    shard_bytes = parse_size(max_shard_size)
    _check_free(target)
    with open_weights(source, loader, **loader_options(option)) as opened, Progress(settings.progress) as progress:
        weights = _cast(opened, wanted)
        read = _counted(weights, progress)
        if to is Format.SAFETENSORS and target.suffix == ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(target, weights.infos(), read, {"format": "pt"})
        else:
            with _appearing(target) as stage:
                if to is Format.SAFETENSORS:
                    write_sharded(stage, weights.infos(), read, max_shard_size=shard_bytes)
                else:
                    write_raw(stage, weights.infos(), read)
                _copy_companions(Path(source).expanduser(), stage, wanted)
    if not settings.quiet:
        remark(f"{len(weights):,} tensors, {weights.nbytes:,} bytes, in {target}")


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
    if target.is_dir():
        if any(target.iterdir()):
            raise SaveError(
                f"{target} is a folder with something in it", file=target, hint="name a new or an empty folder"
            )
    elif target.exists() or target.is_symlink():
        raise SaveError(f"{target} exists already", file=target, hint="name another, or remove it first")


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of ``target`` when the block ends well; otherwise it is gone."""
    target = Path(target.absolute())
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".{target.name}.converting-{secrets.token_hex(4)}")
    stage.mkdir()
    try:
        yield stage
        if target.is_dir():
            target.rmdir()
        stage.rename(target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _copy_companions(source: Path, stage: Path, dtype: torch.dtype | None) -> None:
    if not source.is_dir():
        return
    for file in sorted(source.iterdir()):
        name = file.name.lower()
        if not name.endswith(_COPIED) or name in _NOT_COPIED or ".index." in name or not file.is_file():
            continue
        if (stage / file.name).exists():
            continue
        if name == "config.json" and dtype is not None:
            config = json.loads(file.read_text(encoding="utf-8"))
            said = json.dumps(_with_dtype(config, str(dtype).removeprefix("torch.")), indent=2)
            (stage / file.name).write_text(said + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, stage / file.name)


def _with_dtype(config: Any, dtype: str) -> Any:
    """A config that says the new dtype wherever it said the old one: loaders go by it."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in config.items()
    }
