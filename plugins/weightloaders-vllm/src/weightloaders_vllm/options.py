"""What a user asks for by ``model_loader_extra_config``, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from weightloaders import WeightLoaderRegistry
from weightloaders.errors import ConfigError, WeightLoadersError
from weightloaders.prepare import load_context
from weightloaders.validation import Checked

if TYPE_CHECKING:
    from weightloaders import BaseWeightLoader
    from weightloaders.loading import LoadContext

_WHERE = "model_loader_extra_config"
_Word = Literal["error", "warn", "ignore"]
_Policy = _Word | dict[str, _Word]


class LoadOptions(Checked):
    """The keys of ``model_loader_extra_config``.

    Attributes:
        loader: A loader's name, or ``"package.module:Class"``.
        kwargs: Its options.
        rules: Renames, drops and conversions that lead from the checkpoint's names to those that vLLM's model takes.
        on_missing: What is done about parameters that nothing was written to: ``"error"``, ``"warn"``, ``"ignore"``,
            or a dict of name pattern to one of these.
        on_unexpected: Likewise for tensors that vLLM's model did not use.
        on_mismatch: Likewise for tensors that were cut to fit.
        verify: ``"finite"``, ``"sha256"``, or both in a list.
        transfer: How bytes are moved; see `weightloaders.load_into`. Default: ``"mmap"``. What vLLM's models get they
            copy, so files are best mapped: each byte is touched once, by the rank that uses it. What can't be mapped
            is read ahead.
        watch: Whether it is watched what is written. If not, policies hold for nothing.
    """

    loader: str = "auto"
    kwargs: dict[str, Any] = Field(default_factory=dict)
    rules: Any = None
    on_missing: _Policy = "error"
    on_unexpected: _Policy = "warn"
    on_mismatch: _Policy = "error"
    verify: Literal["finite", "sha256"] | list[Literal["finite", "sha256"]] | None = None
    transfer: Any = None
    watch: bool = True

    @classmethod
    def of(cls, load_format: str, extra: Any) -> LoadOptions:
        """The options of a load format and its extra config.

        Raises:
            ConfigError: If a key is unknown or a value not allowed.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{_WHERE} is a dict, not a {type(extra).__name__}")
        values, short = dict(extra), load_format.partition(":")[2]
        if short and values.setdefault("loader", short) != short:
            raise ConfigError(f"load_format={load_format!r} and {_WHERE}['loader'] name two loaders")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{_WHERE}: {error.message}") from None

    def context(self, on_missing: Any = None) -> LoadContext:
        """The same in the core's words.

        Args:
            on_missing: What counts instead of what was said.

        Raises:
            WeightLoadersError: If rules, policies or ways to move bytes can't be understood.
        """
        policy: Any = self.on_missing if on_missing is None else on_missing
        return load_context(
            self.rules, policy, self.on_unexpected, self.on_mismatch,
            progress=False, verify=self.verify, transfer="mmap" if self.transfer is None else self.transfer,
        )  # fmt: skip

    def create_loader(self, source: str | None = None, revision: str | None = None) -> BaseWeightLoader:
        """The loader, with its options.

        Args:
            source: What it is to read, for ``auto`` to choose.
            revision: The commit, tag or branch that vLLM was given.

        Raises:
            WeightLoadersError: If there is none of that name, or it does not take the options.
        """
        options = dict(self.kwargs)
        if revision is not None:
            options.setdefault("revision", revision)
        return WeightLoaderRegistry.resolve(self.loader, options, source=source)


def check(load_format: str, extra: Any) -> None:
    """Refuse what can't be used, from what was said alone: nothing is opened.

    Raises:
        ConfigError: With what is wrong.
    """
    options = LoadOptions.of(load_format, extra)
    try:
        options.context()
        options.create_loader()
    except WeightLoadersError as error:
        raise ConfigError(f"{_WHERE}: {error.message}", plugin=error.plugin, hint=error.hint) from error
