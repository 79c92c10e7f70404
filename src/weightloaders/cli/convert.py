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

from weightloaders.cli.common import (
    Loader,
    Option,
    Rules,
    Source,
    loader_options,
    policies,
    remark,
    rules_file,
    settings,
)
from weightloaders.cli.hints import for_command_line
from weightloaders.errors import ModelError, OptionsError, SaveError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from weightloaders.loaders.base import BaseWeightLoader
    from weightloaders.progress import Progress
    from weightloaders.weights.weights import Weights

# What makes a folder of weights a model: config, tokenizer, chat template, code. An index belongs to the old weights.
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
_NOT_COPIED = ("meta.txt", "trainer_state.json")
_CONFIG = "config.json"
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
    rules: Rules = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="Write in the layout of this checkpoint, from whose names --rules lead to those of SRC.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR",
            help="Folder or hub id with the config that tells the rules' sizes. Default: SRC.",
            show_default=False,
        ),
    ] = None,
    on_missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Tensors of --like that SRC has no values for: error, warn or ignore; or PATTERN=one of these.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the weights of SRC in another format, with the config and tokenizer files that lie beside them.

    One tensor is in memory at a time. DST appears once it is complete; nothing that exists is replaced. With --rules,
    names and layouts change on the way; with --like as well, they change back.
    """
    from weightloaders.api import open_to_read
    from weightloaders.loaders.place import as_name
    from weightloaders.progress import Progress
    from weightloaders.registry import WeightLoaderRegistry
    from weightloaders.validation import parse_size
    from weightloaders.weights.atomic import made_folder
    from weightloaders.weights.raw import RawFolder, dtype_option
    from weightloaders.weights.safetensors import SafetensorsFolder, write_safetensors

    if on_missing and like is None:
        raise OptionsError("--on-missing is about the tensors of another checkpoint, so --like goes with it")
    target = _at_home(destination)
    wanted = None if dtype is None else dtype_option(dtype, "--dtype", real=True)
    shard_bytes = parse_size(max_shard_size)
    _check_free(target)
    is_one_file = to is Format.SAFETENSORS and target.suffix == ".safetensors"
    reader = WeightLoaderRegistry.resolve(loader, loader_options(option), source=as_name(source))
    folder = _model_folder(reader, source)
    companions = {} if is_one_file else _companions(folder, wanted)
    with open_to_read(source, reader) as opened, Progress(settings.progress) as progress:
        laid_out = (
            opened if rules is like is None else _laid_out(opened, rules, like, _config(model, source), on_missing)
        )
        weights = _cast(laid_out, wanted)
        if _CONFIG in companions and folder != _at_home(source) and not _describes(folder, weights):
            del companions[_CONFIG]
            remark(
                "the config is left out: it describes a model in which other names stand than these weights have; "
                "from_pretrained and save_weights write it with its weights"
            )
        read = _counted(weights, progress)
        if is_one_file:
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


def _laid_out(
    weights: Weights, rules: str | None, like: str | None, config: Any, on_missing: list[str] | None
) -> Weights:
    """The same weights as rules say, or back in the layout of a checkpoint that rules would make them of."""
    from weightloaders.api import open_weights
    from weightloaders.mapping.parsing import parse_rules
    from weightloaders.plan import Policies
    from weightloaders.saving import arrange, laid_out_like, rearranged
    from weightloaders.weights.weights import Weights

    parsed = parse_rules(rules_file(rules))
    if like is None:
        plan = arrange(weights.infos(), parsed, config)
        for finding in plan.findings:
            remark(for_command_line(str(finding)))
        return Weights.describe(rearranged(plan))
    decided = policies(on_missing=on_missing).get("on_missing", "error")
    with open_weights(like) as other:
        return Weights.describe(
            laid_out_like(weights.infos(), other.infos(), parsed, config, Policies(missing=decided))
        )


def _config(model: str | None, source: str) -> Any:
    """The config of a model, as it stands in its file; None where there is none beside the weights."""
    from weightloaders.skeleton import model_files

    file = _at_home(source) / _CONFIG if model is None else model_files(model, needed=_CONFIG) / _CONFIG
    if not file.is_file():
        return None
    config = _read_config(file)
    # Models of text and more keep what is said of the text by itself.
    text = config.get("text_config") if isinstance(config, dict) else None
    return {**config, **text} if isinstance(text, dict) else config


def _read_config(file: Path) -> Any:
    from weightloaders.weights.texts import read_text

    text = read_text(file, _MAX_CONFIG_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SaveError(f"the config {file} is no JSON: {error}", file=file) from error


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
    from weightloaders.saving import cast

    return cast(name, weights[name], dtype)


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


def _model_folder(reader: BaseWeightLoader, source: str) -> Path:
    """Where a model's config and tokenizer lie: beside its weights, if their loader knows nothing else."""
    from weightloaders.loaders.place import as_name

    for needed, what in (("", "tokenizer"), (_CONFIG, "config")):
        try:
            found = reader.get_model_files(as_name(source), needed)
        except (ModelError, SourceError) as error:
            remark(for_command_line(f"no {what} comes along: {error.message}"))
        else:
            return found if isinstance(found, Path) else _at_home(source)
    return _at_home(source)


def _describes(folder: Path, weights: Weights) -> bool:
    """Whether a config that a loader has made is that of a model with names as these weights have."""
    from weightloaders.skeleton import build_skeleton

    try:
        names = {name for name, _ in build_skeleton(str(folder)).model.named_parameters()}
    except ModelError:
        # Then nobody can build a wrong model by it, either.
        return True
    return any(name in names for name in weights)


def _companions(source: Path, dtype: torch.dtype | None) -> dict[str, Path | str]:
    """What comes along, by name: files to copy, or the text of one that changes. Read before anything is written."""
    found: dict[str, Path | str] = {}
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        name = file.name.lower()
        if not name.endswith(_COPIED) or name in _NOT_COPIED or ".index." in name or not file.is_file():
            continue
        found[file.name] = file
        if name == _CONFIG and dtype is not None:
            changed = _with_dtype(_read_config(file), str(dtype).removeprefix("torch."))
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
