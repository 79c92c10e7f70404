"""Changes to bytes, texts and trees of JSON, drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
import struct
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

#: Where sizes overflow, wrap round or become negative, and their neighbours.
NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 4095, 4096, 32767, 32768, 65535, 65536,
    (1 << 24) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 53) + 1, 1 << 60, (1 << 61) - 1,
    1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1, -2, -128, -(1 << 31), -(1 << 63),
)  # fmt: skip
#: What people and programs write where something else should be.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, "", ".", "..", "a", "\0", "\ud800", "é", "😀", "\\", "/", "../x", "/etc/passwd", "~", "*",
    "**", "{i}",
    0.0, -0.0, 0.5, 1e308, -1.5, [], {}, [[]], [{}], {"": 0}, [0], [1, 2], "x" * 300, 10**30, "__metadata__", "1",
    "NaN",
)  # fmt: skip
# Texts that a parser of JSON or YAML may take for something else.
_FRAGMENTS = (
    "null", "true", "NaN", "-Infinity", "1e999", "1e5", "-0", "01", "0x10", "0b1", "1_000", "1.", ".inf", "'",
    '"', "\\u0000", "\\ud800",
    "\\udc00", "{", "}", "[", "]", ",", ":", "\n", " ", "\t", "\ufeff", "[" * 300, '{"a":' * 200, "&a ", "*a",
    "<<: ", "!!int ",
    "!!python/object/apply:os.system [x]", "!!timestamp ", "!!binary ", "!!set ", "- ", "? ", "| ", "> ",
    "%YAML 9", "---\n",
    "...\n", "2020-01-01", "2020-13-45", "99999999999999999999", "#", "==", "${", "1:2:3", "~", "\u2028", "\x85",
    "\x00", "\x1b",
)  # fmt: skip


class Mutator:
    """Changes things at random.

    Args:
        rng: What decides.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def some(self) -> range:
        """As many changes as one input gets: mostly one, seldom more than four."""
        count = 1
        while count < 8 and self.rng.random() < 0.4:
            count += 1
        return range(count)

    def number(self) -> int:
        """A size that may be awkward."""
        if self.rng.random() < 0.3:
            return self.rng.randrange(1 << self.rng.choice((4, 8, 16, 32, 64)))
        return self.rng.choice(NUMBERS)

    # -- bytes

    def data(self, data: bytes, tokens: Sequence[bytes] = (), others: Sequence[bytes] = ()) -> bytes:
        """Bytes with a few changes.

        Args:
            data: What is changed.
            tokens: What may be put in.
            others: What parts may be taken from.
        """
        changed = bytearray(data)
        for _ in self.some():
            self._change(changed, tokens, others)
        return bytes(changed)

    def _change(self, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
        rng = self.rng
        if not data:
            data += rng.choice(tokens) if tokens else rng.randbytes(8)
            return
        at = rng.randrange(len(data))
        kind = rng.randrange(11)
        if kind <= 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind <= 4:
            width = rng.choice((1, 2, 4, 8))
            order: Literal["little", "big"] = "little" if rng.random() < 0.8 else "big"
            data[at : at + width] = (self.number() % (1 << 8 * width)).to_bytes(width, order)
        elif kind == 5:
            data[at:] = b"" if rng.random() < 0.5 else data[at : len(data) - rng.randrange(1, 9)]
        elif kind == 6:
            del data[at : at + rng.choice((1, 2, 4, 8, rng.randrange(1, 64)))]
        elif kind == 7:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        elif kind == 8 and tokens:
            token = rng.choice(tokens)
            data[at : at + rng.choice((0, len(token)))] = token
        elif kind == 9 and others:
            other = rng.choice(others)
            if other:
                begin = rng.randrange(len(other))
                piece = other[begin : begin + rng.randrange(1, 200)]
                data[at : at + rng.choice((0, len(piece)))] = piece
        else:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8)))

    # -- texts

    def text(self, text: str, words: Sequence[str] = ()) -> str:
        """A text with a few changes, by characters, words and lines."""
        for _ in self.some():
            rng = self.rng
            at = rng.randrange(len(text) + 1)
            end = min(len(text), at + rng.choice((0, 1, 2, 8, 40)))
            kind = rng.randrange(7)
            if kind == 0:
                new = rng.choice(_FRAGMENTS)
            elif kind == 1:
                new = str(self.number())
            elif kind == 2:
                new = rng.choice(words or _FRAGMENTS)
            elif kind == 3:
                new, end = "", max(end, at + 1)
            elif kind == 4:
                new, end = text[max(0, at - rng.randrange(1, 40)) : at], at
            elif kind == 5:
                lines = text.split("\n")
                rng.shuffle(lines)
                text, new, end = "\n".join(lines), "", at
            else:
                new = chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), 0x1F600)))
            text = text[:at] + new + text[end:]
        return text

    # -- trees of JSON

    def tree(self, value: Any, words: Sequence[Any] = ()) -> Any:
        """A tree of dicts, lists and plain values with a few changes; ``words`` are values that may be put in."""
        for _ in self.some():
            value = self._change_tree(value, words)
        return value

    def _change_tree(self, root: Any, words: Sequence[Any]) -> Any:
        rng = self.rng
        holder: Any = [root]
        top, key = holder, 0
        # Down to somewhere: the deeper, the more there is to change.
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.85:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        kind = rng.randrange(8)
        old = holder[key]
        if kind == 0 and holder is not top:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[self._name(str(key), words)] = copy.deepcopy(old)
            if rng.random() < 0.5:
                del holder[key]
        elif kind == 1 and holder is not top:
            holder.insert(key, copy.deepcopy(old))
        elif kind == 2 and isinstance(old, list | dict):
            self._grow(old, words)
        elif kind == 3:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind == 4 and words:
            holder[key] = copy.deepcopy(rng.choice(words))
        elif kind == 5:
            holder[key] = rng.choice(([old], {"a": old}, str(old)[:200], None))
        elif type(old) is int:
            holder[key] = old + rng.choice((-1, 1, 8, -8)) if rng.random() < 0.5 else self.number()
        elif isinstance(old, str):
            holder[key] = self.text(old)
        else:
            holder[key] = self.number()
        return top[0]

    def _name(self, name: str, words: Sequence[Any]) -> str:
        choice = self.rng.randrange(4)
        if choice == 0:
            return self.text(name)
        if choice == 1:
            return str(self.rng.choice(ODD_VALUES))
        return str(self.rng.choice(words)) if words else name + "2"

    def _grow(self, value: Any, words: Sequence[Any]) -> None:
        new = copy.deepcopy(self.rng.choice(words if words and self.rng.random() < 0.5 else ODD_VALUES))
        if isinstance(value, list):
            value.insert(self.rng.randrange(len(value) + 1), new)
        else:
            value[self._name("a", words)] = new

    def json(self, raw: bytes, words: Sequence[Any] = ()) -> bytes:
        """A JSON text, changed as a tree or as a text."""
        try:
            tree = json.loads(raw)
        except (ValueError, RecursionError):
            tree = None
        if tree is not None and self.rng.random() < 0.8:
            raw = dumped(self.tree(tree, words))
            if self.rng.random() < 0.9:
                return raw
        text = raw.decode("utf-8", "surrogateescape")
        return self.text(text, [json.dumps(w) for w in words[:20]]).encode("utf-8", "surrogatepass")


def dumped(tree: Any) -> bytes:
    """A tree as compact JSON in ASCII."""
    return json.dumps(tree, separators=(",", ":")).encode()


def either(rng: Random, *ways: tuple[float, Callable[[], Any]]) -> Any:
    """The result of one of several functions, each with its weight."""
    (way,) = rng.choices([way for _, way in ways], [weight for weight, _ in ways])
    return way()


def packed(code: str, *values: int) -> bytes:
    """Whole numbers as `struct` packs them, wrapped round to what fits."""
    sizes = {"B": 8, "H": 16, "I": 32, "Q": 64}
    return b"".join(
        struct.pack("<" + letter, value % (1 << sizes[letter])) for letter, value in zip(code, values, strict=True)
    )
