"""GGUF headers put together byte by byte, sound ones and others."""

from __future__ import annotations

import struct
from typing import Any

UINT32, STRING, ARRAY, FLOAT32 = 4, 8, 9, 6


def text(value: str | bytes, order: str = "<") -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack(f"{order}Q", len(raw)) + raw


def pair(key: str | bytes, code: int, value: bytes, order: str = "<") -> bytes:
    return text(key, order) + struct.pack(f"{order}I", code) + value


def number(key: str, value: int, order: str = "<") -> bytes:
    return pair(key, UINT32, struct.pack(f"{order}I", value), order)


def string(key: str, value: str | bytes, order: str = "<") -> bytes:
    return pair(key, STRING, text(value, order), order)


def array(key: str, code: int, count: int, values: bytes, order: str = "<") -> bytes:
    return pair(key, ARRAY, struct.pack(f"{order}IQ", code, count) + values, order)


def tensor(name: str | bytes, dims: tuple[int, ...], code: int = 0, offset: int = 0, order: str = "<") -> bytes:
    """Sizes as the file has them: the innermost first."""
    return (
        text(name, order)
        + struct.pack(f"{order}I", len(dims))
        + struct.pack(f"{order}{len(dims)}Q", *dims)
        + struct.pack(f"{order}IQ", code, offset)
    )


def gguf_file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    order: str = "<",
    **more: Any,
) -> bytes:
    assert not more
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    header = b"GGUF" + struct.pack(f"{order}IQQ", version, tensor_count, pair_count) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % alignment) + data
