"""`TransferOptions`: how a load moves its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from weightloaders.errors import ConfigError
from weightloaders.validation import Checked, parse_size
from weightloaders.weights.storage import Kind  # noqa: TC001 -- pydantic looks it up when the class is made
from weightloaders.weights.texts import brief

Mode = Literal["direct", "mmap", "o_direct", "stream"]

EXTRA_MEMORY = 64 << 20
# One thread's buffer; with less, nothing can be cast or turned around on the way.
LEAST_EXTRA_MEMORY = 4 << 20
_MOST_THREADS = 256


def _extra_memory(value: Any) -> int:
    try:
        nbytes = parse_size(value)
    except ConfigError:
        nbytes = 0
    if nbytes < LEAST_EXTRA_MEMORY:
        raise ValueError(
            f"should be a size of at least {LEAST_EXTRA_MEMORY >> 20} MiB, in bytes or like '64 MiB' or '64MB'"
        )
    return nbytes


class TransferOptions(Checked):
    """How a load moves its bytes. See the guide on choosing how bytes are moved.

    ::

        load_into(model, "folder", transfer="mmap")
        load_into(model, "folder", transfer=TransferOptions(threads=2, extra_memory="32 MiB", storage="network"))
        load_into(model, "folder", transfer={"threads": 2})

    Attributes:
        mode: ``"direct"``: read into the parameters' own memory. ``"mmap"``: parameters are views of the file where
            dtype and layout allow; the rest is read. ``"o_direct"``: read past the page cache. ``"stream"``: tensors
            are read ahead, one after the other, and handed over as an iterable of pairs.
        threads: How many threads read. Default: by the storage and the processors.
        extra_memory: Most bytes to hold at one time beside the model, as a number or like ``"64 MiB"``; at least
            4 MiB. What has to be held whole, a tensor that is computed with, handed over or streamed, may take
            more.
        storage: What the files lie on: ``"local"``, ``"rotational"``, ``"network"`` or ``"memory"``. Default: what the
            system says.

    Raises:
        ConfigError: If a field is unknown, or a value is not allowed.
    """

    mode: Mode = "direct"
    threads: Annotated[int, Field(ge=1, le=_MOST_THREADS)] | None = None
    extra_memory: Annotated[int, BeforeValidator(_extra_memory)] = EXTRA_MEMORY
    storage: Kind | None = None

    @classmethod
    def of(cls, value: Any) -> TransferOptions:
        """What the ``transfer`` argument stands for: a mode's name, options, or a mapping of them.

        Raises:
            ConfigError: If it is none of these, or not allowed.
        """
        if isinstance(value, TransferOptions):
            return value
        if isinstance(value, str):
            value = {"mode": value}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(
                f"transfer={brief(value)}: a mode, TransferOptions or a mapping of their fields is expected",
                hint="e.g. transfer='mmap', or transfer={'threads': 2, 'extra_memory': '32 MiB'}",
            )
        try:
            return cls(**value)
        except ConfigError as error:
            raise ConfigError(f"transfer: {error.message}") from None


TransferOption = Mode | TransferOptions | Mapping[str, Any]
