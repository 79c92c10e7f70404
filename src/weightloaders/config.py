"""Config files: what `LLM` is called with, as YAML, TOML or JSON.

A file's keys are the names of `LLM`'s parameters. Keys that don't exist are refused, each with the nearest that does,
before anything is opened::

    model: ./smollm2            # relative to the config file
    weight_loader: binary
    weight_loader_kwargs: {dtype: bfloat16, file_pattern: "*.bin"}
    dtype: bfloat16
    sampling_params: {temperature: 0.7, max_tokens: 64}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from weightloaders.errors import ConfigError, SourceError
from weightloaders.loaders.place import as_name
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.verify import Check  # noqa: TC001 -- pydantic reads annotations at run time
from weightloaders.validation import Checked
from weightloaders.weights.folder import path_of
from weightloaders.weights.texts import parse_yaml, read_text

if TYPE_CHECKING:
    from collections.abc import Callable

Decision = Literal["error", "warn", "ignore"]
# One decision for all names, or one for each pattern of names.
Policy = Decision | dict[str, Decision]

_PATHS = ("model", "weights", "tokenizer")
# A config is written by people; more than this is another kind of file, or one made to exhaust memory.
_MAX_BYTES = 1 << 20
_MOST_DOTS = 100


# A name of something; an empty one would be that of the config's own folder.
_Text = Annotated[str, Field(min_length=1)]
# A list of checksums, by its path.
_ListOf = dict[Literal["sha256"], _Text]


class LLMConfig(Checked):
    """The arguments of `LLM`, as a config file gives them.

    A path in ``model``, ``weights``, ``tokenizer``, ``rules`` or ``verify`` is taken relative to the config file's
    folder if it begins with ``./`` or ``../``, or if it exists there; otherwise it stays as it is (a hub id, or
    relative to the working directory). Paths within ``weight_loader_kwargs`` are the loader's affair and stay as they
    are.

    Attributes:
        model: Folder or hub id with the model's config.
        weights: Where the weights lie, if not with the config.
        weight_loader: Name of the loader, or ``package.module:Class``.
        weight_loader_kwargs: Options of the loader, validated by it.
        rules: Rules as in the guide on names and layouts, inline, or the path of a file with them.
        dtype: ``auto`` or the name of a torch dtype, e.g. ``bfloat16``.
        device: Where the model goes.
        device_map: The same for a model over several devices: module names to devices, or ``auto`` and the like.
        engine: What generates the text.
        tokenizer: Folder or hub id of the tokenizer, if not with the config.
        revision: Commit, tag or branch of the model's repository on the hub.
        trust_remote_code: Whether code that lies with the model may run.
        on_missing: What to do about parameters that the source has nothing for.
        on_unexpected: What to do about tensors that the model has no place for.
        on_mismatch: What to do about tensors of another shape.
        progress: False for no progress output.
        verify: Additional checks: ``sha256``, ``finite``, ``record``, ``{sha256: <a list of checksums>}``, or a list of
            several of these.
        automatic: Whether names may be matched without being asked, by wrappers and well-known prefixes.
        transfer: How bytes are moved: the name of a mode, or fields of `TransferOptions`. Default: the engine's own.
        max_num_seqs: How many sequences are generated at once.
        max_model_len: Longest prompt plus output, in tokens. Default: what the model's config says.
        sampling_params: Fields of `SamplingParams`, used where `generate` is given none.
        model_kwargs: Further arguments for the model's constructor.
    """

    model: _Text
    weights: _Text | None = None
    weight_loader: str = "auto"
    weight_loader_kwargs: dict[str, Any] = Field(default_factory=dict)
    rules: _Text | list[Any] | dict[str, Any] | None = None
    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | int | dict[str, str | int] | None = None
    engine: str = "transformers"
    tokenizer: _Text | None = None
    revision: _Text | None = None
    trust_remote_code: bool = False
    on_missing: Policy = "error"
    on_unexpected: Policy = "warn"
    on_mismatch: Policy = "error"
    progress: bool | None = None
    verify: Check | list[Check | _ListOf] | _ListOf | None = None
    automatic: bool = True
    transfer: str | dict[str, Any] | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] = 32
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    sampling_params: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("transfer")
    @classmethod
    def _check_transfer(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        try:
            if value is not None:
                TransferOptions.of(value)
        except ConfigError as error:
            # The field's own name is said by whoever complains.
            raise ValueError(error.message.removeprefix("transfer: ")) from None
        return value

    @field_validator("model_kwargs")
    @classmethod
    def _check_model_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            # It would take the place of what the file, or its default, says.
            if name in cls.model_fields:
                raise ValueError(f"{name!r} is a key of the file itself")
            if not name.isidentifier() or name == "self":
                raise ValueError(f"{name!r} is no name of an argument")
        return value

    @classmethod
    def from_file(cls, path: str | Path) -> LLMConfig:
        """Read and check a config file.

        Args:
            path: A ``.yaml``, ``.yml``, ``.toml`` or ``.json`` file.

        Raises:
            ConfigError: If it can't be read, or holds something that is not allowed.
        """
        path = path_of(path)
        try:
            config = cls(**read_config(path))
        except ConfigError as error:
            if error.file is not None:
                raise
            raise ConfigError(f"{path}: {error.message}", file=path) from None
        update: dict[str, Any] = {key: _resolved(getattr(config, key), path.parent) for key in _PATHS}
        update["verify"] = _with_lists_resolved(config.verify, path.parent)
        if isinstance(config.rules, str):
            update["rules"] = _resolved(config.rules, path.parent)
        return config.model_copy(update=update)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for `LLM`, those of the model's constructor among them."""
        arguments = {name: getattr(self, name) for name in type(self).model_fields if name != "model_kwargs"}
        if isinstance(self.rules, str):
            # A string would be taken for rules written out.
            arguments["rules"] = Path(self.rules)
        return {**arguments, **self.model_kwargs}


def read_config(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML, TOML or JSON file.

    Raises:
        ConfigError: If it can't be read or parsed, a key occurs twice, or its top level is no mapping.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"{path} is no config file: its name ends in {path.suffix!r}"
            if path.suffix
            else f"{path} is no config file: its name has no ending that tells the format",
            file=path,
            hint=f"name it by its format: {', '.join(_PARSERS)}",
        )
    try:
        text = read_text(path, _MAX_BYTES)
    except SourceError as error:
        raise ConfigError(error.message, file=path) from error
    try:
        value = parse(text) if text.strip() else None
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply", file=path) from error
    except ValueError as error:
        raise ConfigError(f"{path} can't be understood: {error}", file=path) from error
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds a {type(value).__name__} at its top level"
        raise ConfigError(f"{path} {what}", file=path, hint="it takes `key: value` pairs, `model:` at the least")
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        raise ConfigError(f"{path} has a key that is no name: {odd[0]!r}", file=path)
    return value


def _parse_toml(text: str) -> Any:
    import tomllib

    # What Python's parser takes for a key goes by the square of its parts: a line of them would be read for hours.
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"line {number} has more than {_MOST_DOTS} dots")
    return tomllib.loads(text)


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
    ".toml": _parse_toml,
    ".json": _parse_json,
}


def _with_lists_resolved(verify: Any, folder: Path) -> Any:
    if isinstance(verify, dict):
        return {check: _resolved(listed, folder) for check, listed in verify.items()}
    return [_with_lists_resolved(one, folder) for one in verify] if isinstance(verify, list) else verify


def _resolved(value: str | None, folder: Path) -> str | None:
    if value is None:
        return None
    path = Path(os.path.expanduser(value))  # noqa: PTH111 -- `Path.expanduser` fails for unknown users
    if path.is_absolute():
        return str(path)
    # `Path.exists` fails for a name that is too long.
    if value.startswith(("./", "../")) or value in (".", "..") or os.path.exists(folder / path):  # noqa: PTH110
        return as_name(folder / path)
    return value
