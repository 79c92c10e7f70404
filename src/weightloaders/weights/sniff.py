"""What a file really is, told from its first bytes: for the message when it is not what its name promises."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightloaders.weights.source import ByteSource

# The answer for a file that is what a reader of safetensors expects.
SAFETENSORS = "a safetensors file"
TAR = "a tar archive"

_HEAD_BYTES = 4096
_QUOTED_CHARACTERS = 80

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_LFS_VERSION = b"version https://git-lfs.github.com/spec/"

_MAGIC = (
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes (.h5)"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"\x28\xb5\x2f\xfd", "Zstandard-compressed data"),
    (b"\xfd7zXZ\x00", "xz-compressed data"),
    (b"BZh", "bzip2-compressed data"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
)
#: The number that torch.save wrote first until version 1.6 (MAGIC_NUMBER in torch/serialization.py), pickled by any
#: protocol; 2 is the usual one, and from 4 on there are frames.
LEGACY_TORCH = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)

# No header comes near this length; bytes of anything else, read as a number of 64 bits, nearly always surpass it.
_PLAUSIBLE_HEADER = 1 << 40


def describe_content(source: ByteSource) -> str | None:
    """Say what a source really holds, in words that fit behind "it is".

    Args:
        source: Any source; a few kilobytes of it are read.

    Returns:
        For example ``"a Git LFS pointer to a file of 4096 bytes, not the file itself"``; None where nothing is
        recognised.

    Raises:
        SourceReadError: If it can't be read.
    """
    if source.size == 0:
        return "an empty file"
    head = source.read(0, min(source.size, _HEAD_BYTES))
    if head.startswith(_LFS_VERSION):
        return _lfs_pointer(head)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_archive(head)
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return what
    if LEGACY_TORCH.match(head):
        return "a PyTorch checkpoint in the format before version 1.6 (pickle)"
    if is_safetensors(head):
        return SAFETENSORS
    # Protocols 2 to 5 begin with an opcode and their number.
    if re.match(rb"\x80[\x02-\x05]", head):
        return "a Python pickle"
    if head[257:262] == b"ustar":
        return TAR
    if not head.strip(b"\0"):
        return _zeros(source, head)
    return _text(head, complete=len(head) == source.size)


def advice(what: str | None) -> str:
    """What to do about a file that holds something else than it should.

    Args:
        what: What `describe_content` said of it.
    """
    for words, advice in _ADVICE:
        if re.search(words, what or ""):
            return advice
    return "fetch it again, and compare its size with the original's"


_ADVICE = (
    ("Git LFS", "run `git lfs pull` in the repository, or download the file itself"),
    ("PyTorch|zip archive", "if torch.save wrote it, name it .bin or .pt, or load it with the 'torch' loader"),
    (
        "HTML|XML|JSON|text",
        "an error was saved in the file's place: check the address and the token, and fetch it again",
    ),
    ("empty|zeros", "the download was interrupted: fetch it again"),
    ("GGUF|NumPy|HDF5|pickle", "load it under its right name, with the loader for that format"),
    ("compressed|archive", "unpack it first"),
)


def is_safetensors(head: bytes) -> bool:
    """Whether these first bytes of a file look like safetensors: a header's length, then a JSON object."""
    return int.from_bytes(head[:8], "little") < _PLAUSIBLE_HEADER and head[8:].lstrip(b" \t\r\n").startswith(b"{")


def _lfs_pointer(head: bytes) -> str:
    fields = dict(line.split(b" ", 1) for line in head.splitlines() if b" " in line)
    size = fields.get(b"size", b"").decode("ascii", "replace")
    oid = fields.get(b"oid", b"").decode("ascii", "replace")
    what = f"a Git LFS pointer to a file of {size} bytes" if size else "a Git LFS pointer"
    return f"{what} ({oid}), not the file itself" if oid else f"{what}, not the file itself"


def _zip_archive(head: bytes) -> str:
    # The first local entry's name follows its 30 bytes of header; its length is at 26 (PKWARE APPNOTE 4.3.7).
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith((b"/data.pkl", b"/byteorder", b"/version", b"/.format_version")):
        return "a PyTorch checkpoint (zip), as torch.save writes .pt, .pth and .bin"
    if name.endswith(b".npy"):
        return "a NumPy archive (.npz)"
    return "a zip archive (torch.save's .pt, .pth and .bin are such)"


def _zeros(source: ByteSource, head: bytes) -> str | None:
    # A download that reserved its space first: zeros in the middle and at the end, too.
    size, length = source.size, len(head)
    samples = (source.read(offset, length) for offset in (size // 2 - length // 2, size - length))
    if any(sample.strip(b"\0") for sample in samples):
        return None
    return "nothing but zeros, as an interrupted download leaves behind"


def _text(head: bytes, *, complete: bool) -> str | None:
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=complete)
    except UnicodeDecodeError:
        return None
    if re.search(r"[^\t\n\f\r\x1b -\x7e\x85\xa0-\U0010ffff]", text) or not text.strip():
        return None
    words = " ".join(text.split())
    lowered = words[:200].lower()
    if lowered.startswith("<!doctype html") or "<html" in lowered:
        title = re.search(r"<title[^>]*>\s*(.*?)\s*</title", words, re.IGNORECASE)
        return f"an HTML page ({_quoted(title[1])})" if title else "an HTML page"
    if lowered.startswith("<"):
        return f"an XML document ({_quoted(words)})"
    if lowered.startswith(("{", "[")):
        return f"JSON text ({_quoted(words)})"
    return f"plain text ({_quoted(words)})"


def _quoted(words: str) -> str:
    return repr(words if len(words) <= _QUOTED_CHARACTERS else words[:_QUOTED_CHARACTERS] + "…")
