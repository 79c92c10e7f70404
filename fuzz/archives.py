"""Zip files taken apart and put together, with claims that need not be true."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuzz.mutate import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuzz.mutate import Mutator

_STORED, _DEFLATED = 0, 8


@dataclass(frozen=True)
class Member:
    """A record of an archive.

    Attributes:
        name: As its bytes are.
        data: What it holds, unpacked.
        method: How it is packed: 0 not at all, 8 deflate; others are claims alone.
        claims: What the directory says instead of the truth: sizes, the place of the record, flags, a checksum.
    """

    name: bytes
    data: bytes
    method: int = _STORED
    claims: tuple[tuple[str, int], ...] = ()


def taken_apart(archive: bytes) -> list[Member]:
    """The members of a sound archive; those of one that isn't as far as it goes."""
    members: list[Member] = []
    at = 0
    while archive[at : at + 4] == b"PK\x03\x04" and len(members) < 50:
        method, size = int.from_bytes(archive[at + 8 : at + 10], "little"), archive[at + 18 : at + 22]
        name_length, extra = archive[at + 26 : at + 28], archive[at + 28 : at + 30]
        begin = at + 30 + int.from_bytes(name_length, "little") + int.from_bytes(extra, "little")
        end = begin + int.from_bytes(size, "little")
        data = archive[begin:end]
        if method == _DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, 1 << 20)
            except zlib.error:
                method = _STORED
        members.append(Member(archive[at + 30 : at + 30 + int.from_bytes(name_length, "little")], data, method))
        at = end
        if archive[at : at + 4] == b"PK\x07\x08":
            at += 16
    return members


def members_of(archive: bytes) -> list[Member]:
    """The members of an archive that somebody else wrote."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return [Member(m.filename.encode(), opened.read(m), m.compress_type) for m in opened.infolist()]


def put_together(members: Sequence[Member], align: int = 1) -> bytes:
    """An archive of members, the data of each at a multiple of ``align``."""
    out, directory = bytearray(), bytearray()
    for member in members:
        data = member.data
        if member.method == _DEFLATED:
            deflate = zlib.compressobj(1, zlib.DEFLATED, -15)
            data = deflate.compress(data) + deflate.flush()
        claims = {
            "crc": zlib.crc32(member.data), "packed": len(data), "size": len(member.data), "at": len(out), "flags": 0,
            "method": member.method, "local_name": len(member.name),
        } | dict(member.claims)  # fmt: skip
        pad = -(len(out) + 30 + len(member.name)) % align
        sizes = packed("III", claims["crc"], claims["packed"], claims["size"])
        head = packed("HHHHH", 20, claims["flags"], claims["method"], 0, 0) + sizes
        out += b"PK\x03\x04" + head + packed("HH", claims["local_name"], pad) + member.name + bytes(pad) + data
        directory += b"PK\x01\x02\x14\x00" + head + packed("HHHHHII", len(member.name), 0, 0, 0, 0, 0, claims["at"])
        directory += member.name
    count = len(members)
    end = packed("HHHHIIH", 0, 0, count, count, len(directory), len(out), 0)
    return bytes(out + directory) + b"PK\x05\x06" + end


def mutated_archive(
    archive: bytes, mutator: Mutator, change: Callable[[Member], bytes], names: Sequence[bytes], align: int = 1
) -> bytes:
    """An archive with changes, mostly to what one of its members holds.

    Args:
        archive: What is changed.
        mutator: What decides.
        change: Changes the data of a member.
        names: Names that a member may be given.
        align: As for `put_together`.
    """
    rng = mutator.rng
    members = taken_apart(archive)
    if not members:
        return mutator.data(archive)
    for _ in mutator.some():
        if not members:
            break
        at = rng.randrange(len(members))
        member = members[at]
        kind = rng.randrange(12)
        if kind <= 6:
            members[at] = replace(member, data=change(member))
        elif kind == 7:
            members[at] = replace(member, name=rng.choice((*names, mutator.data(member.name))))
        elif kind == 8:
            members[at] = replace(member, method=rng.choice((_DEFLATED, _DEFLATED, _STORED, 12, 14, 99)))
        elif kind == 9:
            field = rng.choice(("crc", "packed", "size", "at", "flags", "method", "local_name"))
            members[at] = replace(member, claims=(*member.claims, (field, mutator.number())))
        elif kind == 10:
            members.insert(rng.randrange(len(members) + 1), replace(member, name=rng.choice((member.name, *names))))
        else:
            del members[at]
    result = put_together(members, align)
    return result if rng.random() < 0.9 else mutator.data(result)
