"""`LoadReport`: what a load did."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from weightloaders.errors import ConfigError
from weightloaders.provenance import Provenance, manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_SHOWN = 8
_LEAST_FOR_SPEED = 1_000_000


def bytes_text(count: float) -> str:
    """A number of bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


@dataclass(slots=True)
class LoadReport:
    """What a load did, for people (`str`) and for programs (`to_json`, or the fields).

    Attributes:
        loaded: Parameters and buffers that were filled.
        missing: Parameters that the source did not fill (allowed by a policy, or the load would have failed).
        unexpected: Tensors that the model did not want.
        mismatched: Tensors that did not fit (allowed by a policy).
        initialised: Missing parameters that were initialised as their module would.
        skipped_files: Files of the source left out, with the reason.
        cast: Parameter -> stored dtype and its own, as text.
        tied: Parameter -> the one whose memory or value it shares.
        renamed: Source name -> the model's name, where they differ.
        automatic: What was done to names without being asked, a sentence each.
        dropped: Tensors left out by a rule.
        replaced: Parameters that are new objects in the model (where identity could not be kept).
        warnings: What is probably not as it should be.
        notes: How the source was read, where it could have been read otherwise.
        decided_by: What decided about names and layouts.
        loader: Name of the loader, where there was one.
        sources: Parameter -> where its bytes came from and by which rules, as text.
        files: File -> the checksum that it was held against, as ``"sha256:..."`` or ``"git:..."``, with
            ``verify="sha256"``.
        provenance: Parameter -> its own checksum and where its bytes came from, with ``verify="record"``.
        bytes_read: Bytes read from the source.
        bytes_by_path: The same by how they got where they belong: ``straight`` into the parameters' own memory,
            ``buffered`` (cast or scattered, through a small buffer), ``assembled`` (put together beside the parameter),
            ``computed`` and ``handed over`` (to a parameter's own ``weight_loader``); ``streamed`` in that mode.
            What is ``mapped`` was not read. Empty where no plan was carried out (a stream, code of others).
        reads: In how many positioned reads.
        transfer: How they were moved: the ``mode``, how many ``threads`` read at most, the kind of ``storage`` and how
            that is known (``why``). Empty where no plan was carried out.
        seconds: From the first step to the last, in seconds.
        phases: What they went into, in seconds: ``open`` (the catalogue), ``plan``, ``prepare`` (memory and first
            values), ``transfer``, ``verify``.
        page_faults: Page faults of the process while bytes were moved: those met in memory, and those that had to read
            from a disk. Both 0 where the system does not count them.
        extra_memory: Most bytes that the transfer held at one time beside the model itself.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    skipped_files: dict[str, str] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    automatic: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    decided_by: list[str] = field(default_factory=list)
    loader: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    transfer: dict[str, str | int] = field(default_factory=dict)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    page_faults: tuple[int, int] = (0, 0)
    extra_memory: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Bytes read in a second of the transfer itself, where its time is known; 0 where none was measured."""
        seconds = self.phases.get("transfer", self.seconds)
        return self.bytes_read / seconds if seconds > 0 else 0.0

    def to_json(self) -> str:
        """All fields as a JSON document."""
        return json.dumps(asdict(self), indent=2)

    def manifest(self) -> str:
        """What was loaded, as a JSON document that is the same for each load of the same (see :doc:`manifest`).

        Raises:
            ConfigError: If the load was not asked to ``verify="record"``.
        """
        if not self.provenance:
            raise ConfigError("this load has recorded nothing", hint="ask for it: load_into(..., verify='record')")
        return manifest(self.provenance, self.tied, self.files)

    def __str__(self) -> str:
        # The speed of so few bytes is that of the work around them.
        is_telling = self.bytes_read >= _LEAST_FOR_SPEED
        rows: list[tuple[str, str]] = [
            ("tensors", f"{len(self.loaded):,} loaded" + (f" by {self.loader}" if self.loader else "")),
            ("bytes", f"{self.bytes_read:,} ({bytes_text(self.bytes_read)})" + _ways(self.bytes_by_path, self.reads)),
            *([("transfer", _transfer(self.transfer))] if self.transfer and self.reads else []),
            (
                "seconds",
                f"{self.seconds:.3f}"
                + (f" ({self.bytes_per_second / 1e9:.2f} GB/s)" if is_telling else "")
                + _phases(self.phases),
            ),
            ("extra memory", bytes_text(self.extra_memory) + _faults(self.page_faults)),
        ]
        names: list[tuple[str, Collection[str]]] = [
            ("missing", self.missing), ("unexpected", self.unexpected), ("mismatched", self.mismatched),
            ("initialised", self.initialised), ("tied", self.tied), ("renamed", self.renamed),
            ("dropped", self.dropped), ("replaced", self.replaced), ("skipped files", self.skipped_files),
        ]  # fmt: skip
        rows.extend((label, _named(value)) for label, value in names if value)
        rows.extend(("cast", text) for text in _casts(self.cast))
        if self.provenance:
            rows.append(("recorded", f"{len(self.provenance):,} checksums of parameters"))
        if self.decided_by:
            rows.append(("decided by", ", ".join(self.decided_by)))
        rows.extend(("automatic", done) for done in self.automatic)
        rows.extend(("warning", warning) for warning in self.warnings)
        rows.extend(("note", note) for note in self.notes)
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _ways(bytes_by_path: Mapping[str, int], reads: int) -> str:
    ways = ", ".join(f"{bytes_text(nbytes)} {path}" for path, nbytes in bytes_by_path.items())
    return f": {ways}; {reads:,} read{'' if reads == 1 else 's'}" if ways else ""


def _transfer(how: Mapping[str, str | int]) -> str:
    threads = f"{how['threads']} thread{'' if how['threads'] == 1 else 's'}"
    return f"{how['mode']}, {threads}, {how['storage']} storage ({how['why']})"


def _phases(phases: Mapping[str, float]) -> str:
    return ": " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items()) if phases else ""


def _faults(counted: tuple[int, int]) -> str:
    in_memory, from_disk = counted
    told = f"; {in_memory:,} page fault{'' if in_memory == 1 else 's'}" if any(counted) else ""
    return told + (f", {from_disk:,} from disk" if from_disk else "")


def _named(names: Collection[str]) -> str:
    return f"{len(names):,}: {_some(names)}"


def _some(names: Collection[str]) -> str:
    return ", ".join(list(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _casts(cast: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    by_pair: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, pair in cast.items():
        by_pair[pair].append(name)
    for (stored, own), names in by_pair.items():
        yield f"{len(names):,} from {stored} to {own}: {_some(names)}"
