"""Every error the library raises, as one tree.

::

    WeightLoadersError
    ├── SourceError
    │   ├── SourceNotFoundError        (FileNotFoundError)  no such path, or no weights in it
    │   ├── IncompleteCheckpointError  (FileNotFoundError)  an index names a shard or tensor that is not there
    │   ├── AmbiguousSourceError       (ValueError)         several candidates and nothing decides
    │   ├── CheckpointFormatError      (ValueError)         a file is not what it claims to be
    │   │   └── UnsupportedDtypeError                       a stored dtype that torch has no name for
    │   ├── DuplicateTensorError       (ValueError)         one name, two different values
    │   ├── UnsafeCheckpointError      (ValueError)         a pickle that runs code, a path that leaves the folder
    │   ├── SourceReadError            (OSError)            bytes that could not be read, or changed meanwhile
    │   │   └── RemoteReadError                             an address whose server can't be reached, or refuses
    │   ├── SourceClosedError          (ValueError)         the weights were closed
    │   └── UnknownTensorError         (KeyError)           the source has no tensor of that name
    ├── RegistryError
    │   ├── UnknownLoaderError         (LookupError)
    │   ├── LoaderConflictError        (LookupError)        two distributions offer one name
    │   ├── LoaderDisabledError        (LookupError)
    │   ├── LoaderNameError            (ValueError)         a name that is taken, reserved or malformed
    │   ├── BrokenPluginError          (ImportError)
    │   └── LoaderContractError        (TypeError)          a loader that does not keep the contract
    ├── OptionsError                   (ValueError)         loader options: unknown or ill-typed
    ├── ConfigError                    (ValueError)         a config file or value that can't be used
    ├── RuleError                      (ValueError)         a rule that can't be understood or applied
    ├── PlanError                      (ValueError)         the plan found errors; nothing was touched
    ├── LoadError                      (RuntimeError)       a load that failed on the way; the model is marked
    ├── CoverageError                  (LoadError)          code that is not ours left parameters unfilled
    ├── SaveError                      (RuntimeError)       weights that could not be saved; what was there is untouched
    ├── HalfLoadedModelError           (RuntimeError)       the model was left half-loaded by an earlier failure
    ├── ModelError                     (ValueError)         a model or config that can't be built or used
    └── MissingDependencyError         (ImportError)        an optional package is needed

Each carries ``file``, ``tensor``, ``plugin`` and ``hint`` for programs, and the same in its message for people.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# Names of files and tensors come from outside, and may be as long as whoever made them pleased. (A file's own name has
# at most 255 bytes; what is cut here is longer than any path that people use.)
_LONG_WORD = re.compile(r"\S{513,}")
# What a terminal takes for a command, or can't show at all: control characters but for the tab, halves of surrogate
# pairs, and characters that turn the direction of a text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _cut(word: re.Match[str]) -> str:
    text = word[0]
    return f"{text[:200]}…({len(text):,} characters)…{text[-50:]}"


def _escaped(text: str) -> str:
    """A line of text as it can be shown wherever it came from."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class WeightLoadersError(Exception):
    """The root of every error of this library.

    Args:
        message: What is wrong, as a sentence.
        file: The file or address at fault.
        tensor: The tensor at fault.
        plugin: The plugin at fault, with its version where it is known.
        hint: What to do about it.

    Attributes:
        message: The sentence without the place and the hint.
        file: See above.
        tensor: See above.
        plugin: See above.
        hint: See above.
    """

    def __init__(
        self,
        message: str,
        *,
        file: object | None = None,
        tensor: str | None = None,
        plugin: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.plugin = plugin
        self.hint = hint

    def __str__(self) -> str:
        # A message may have lines; what a file calls itself, or a tensor, may not.
        lines = [_escaped(line) for line in self.message.split("\n")]
        # A place that the sentence already names is not repeated.
        for label, value in (("file", self.file), ("tensor", self.tensor), ("plugin", self.plugin)):
            if value and value not in self.message:
                lines.append(f"  {label}: {_escaped(value)}")
        if self.hint:
            lines += [_escaped(line) for line in f"  what to do: {self.hint}".split("\n")]
        return _LONG_WORD.sub(_cut, "\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross process borders.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def summary(error: BaseException) -> str:
    """An exception in one phrase: its type and what it says."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001 -- an exception of somebody else's makes its text by code of theirs
        text = f"(its text can't be had: {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _rebuild(kind: type[WeightLoadersError], args: tuple[Any, ...], state: Mapping[str, Any]) -> WeightLoadersError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


# ------------------------------------------------------------------ sources


class SourceError(WeightLoadersError):
    """Something is wrong with where the weights come from."""


class SourceNotFoundError(SourceError, FileNotFoundError):
    """There is no such path or repository, or it holds no weights."""


class IncompleteCheckpointError(SourceError, FileNotFoundError):
    """An index names a shard that is absent, or a tensor that is not in the shard it names."""


class AmbiguousSourceError(SourceError, ValueError):
    """Several candidates, and nothing that decides between them."""


class CheckpointFormatError(SourceError, ValueError):
    """A file is truncated, corrupted or another kind of file than it claims."""


class UnsupportedDtypeError(CheckpointFormatError):
    """A tensor is stored in a dtype that this torch does not have."""


class DuplicateTensorError(SourceError, ValueError):
    """One name stands for two tensors with different values."""


class UnsafeCheckpointError(SourceError, ValueError):
    """Reading this source would run code or leave its folder."""


class SourceReadError(SourceError, OSError):
    """Bytes could not be read, or the file changed since it was catalogued.

    Attributes:
        at: The byte at which reading failed; None where that isn't known.
    """

    def __init__(self, message: str, *, at: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.at = at


class RemoteReadError(SourceReadError):
    """What lies at an address could not be read: the server can't be reached, refuses, or does not serve parts.

    Attributes:
        status: The status that it answered with; None if it did not answer.
        code: The hub's own code for the reason; empty where there is none.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.status = status
        self.code = code


class SourceClosedError(SourceError, ValueError):
    """The weights were closed before they were read."""


class UnknownTensorError(SourceError, KeyError):
    """The source holds no tensor of that name."""


# ------------------------------------------------------------------ registry


class RegistryError(WeightLoadersError):
    """Something is wrong with finding or creating a loader."""


class UnknownLoaderError(RegistryError, LookupError):
    """No loader has that name."""


class LoaderConflictError(RegistryError, LookupError):
    """Two distributions offer a loader of one name."""


class LoaderDisabledError(RegistryError, LookupError):
    """The loader or its distribution is disabled by ``WEIGHTLOADERS_DISABLE``."""


class LoaderNameError(RegistryError, ValueError):
    """A name that is taken, belongs to a built-in, or is no valid name."""


class BrokenPluginError(RegistryError, ImportError):
    """A plugin could not be imported or did not register."""


class LoaderContractError(RegistryError, TypeError):
    """A loader returned or is something that the contract does not allow."""


# ------------------------------------------------------------------ everything else


class OptionsError(WeightLoadersError, ValueError):
    """A loader option is unknown, missing or of the wrong type."""


class ConfigError(WeightLoadersError, ValueError):
    """A config file or value can't be used."""


class RuleError(WeightLoadersError, ValueError):
    """A rule can't be understood, or can't be applied to this source."""


class PlanError(WeightLoadersError, ValueError):
    """The plan found errors, so nothing was touched.

    Attributes:
        plan: The plan, with its findings (None where there was no catalogue to plan from).
    """

    def __init__(self, message: str, *, plan: Any = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        # A plan holds live parameters; only what it said crosses a process border.
        return (_rebuild, (type(self), self.args, {**self.__dict__, "plan": None}))


class LoadError(WeightLoadersError, RuntimeError):
    """A load failed after it had begun to write.

    Attributes:
        written: Names of the parameters that were written, in whole or in part.
    """

    def __init__(self, message: str, *, written: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.written = written

    @staticmethod
    def of(error: WeightLoadersError, written: Iterable[str]) -> LoadError:
        """The same fault, as one of a load that had written to these parameters."""
        return LoadError(
            error.message, written=tuple(sorted(written)),
            file=error.file, tensor=error.tensor, plugin=error.plugin, hint=error.hint,
        )  # fmt: skip


class CoverageError(LoadError):
    """A model's or a loader's own loading code left parameters unfilled, or used only part of a tensor.

    Attributes:
        missing: Names of the parameters left unfilled.
    """

    def __init__(self, message: str, *, missing: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.missing = missing


class SaveError(WeightLoadersError, RuntimeError):
    """Weights could not be saved; what the folder held before is untouched."""


class HalfLoadedModelError(WeightLoadersError, RuntimeError):
    """The model was left half-loaded by an earlier failure, so it is not used or saved.

    Attributes:
        written: Names of the parameters that the load had written, in whole or in part.
    """

    def __init__(self, message: str, *, written: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.written = written


class ModelError(WeightLoadersError, ValueError):
    """A model, or its config, can't be built or used."""


class MissingDependencyError(WeightLoadersError, ImportError):
    """An optional package is needed for this."""
