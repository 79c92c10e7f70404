"""The plan as a document: what it holds, and within which bounds. See ``docs/reference/plan-json.md``.

Whoever reads one can rely on names, types and bounds; whether it is true of a model and of files is proved elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from weightloaders.errors import PlanError

FORMAT = "weightloaders plan"
VERSION = 1

# Addresses are 64-bit; sums of a few of these still are.
_LARGEST = 1 << 60
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
# More dimensions than torch itself has.
Sizes = Annotated[list[Count], Field(max_length=64)]
# How often, the step in the source, the step in the target.
Loop = tuple[Count, Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)], Annotated[int, Field(ge=1, le=_LARGEST)]]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class FileData(_Part):
    """A file of the source, by its name below the source's root."""

    name: str
    size: Count


class ExtentData(_Part):
    """Where bytes lie: see `Extent`; what is left out is as the tensor has it, in row-major order."""

    file: Count
    offset: Count
    length: Count
    dtype: str | None = None
    byteorder: Literal["little", "big"] = "little"
    shape: Sizes | None = None
    strides: Sizes | None = None
    at: Sizes | None = None


class TensorData(_Part):
    """A tensor of the source; without extents its loader makes it."""

    name: str
    dtype: str
    shape: Sizes
    extents: Annotated[list[ExtentData], Field(max_length=1024)] | None = None


class TargetData(_Part):
    """A parameter or buffer of the model."""

    name: str
    kind: Literal["parameter", "buffer"]
    dtype: str
    shape: Sizes
    tied_to: str | None = None


class ModelData(_Part):
    """What the model wants filled."""

    targets: list[TargetData]


class SourceData(_Part):
    """What the source holds."""

    root: str
    files: list[FileData]
    tensors: list[TensorData]


class FingerprintData(_Part):
    """Checksums of what the document says of model and source; where the source lies plays no part."""

    model: str
    source: str


class PlacementData(_Part):
    """A strided copy; without a source it is a constant, or nothing is written."""

    source: Count | None = None
    constant: int | float | Literal["nan", "inf", "-inf"] | None = None
    start: Annotated[Count, Field(alias="from")]
    to: Count
    loops: Annotated[list[Loop], Field(max_length=64)]


class CopyData(_Part):
    """A `CopyStep`."""

    kind: Literal["copy"]
    target: str
    sources: list[str]
    placements: list[PlacementData]
    rules: tuple[str, ...] = ()


class ConvertData(_Part):
    """The function of a `Convert` rule: a ready-made layout, or ``package.module:function``."""

    kind: Literal["convert"]
    sources: list[str]
    targets: list[str]
    function: str
    sizes: dict[str, JsonValue]
    shared: list[str]


class TransformersData(_Part):
    """A conversion that transformers declares."""

    kind: Literal["transformers"]
    target: str
    patterns: list[str]
    operations: list[str]
    sources: dict[str, str]


class UnnamedData(_Part):
    """A function that can't be found again, and why."""

    kind: Literal["unnamed"]
    why: str


class ComputeData(_Part):
    """A `ComputeStep`."""

    kind: Literal["compute"]
    targets: list[str]
    sources: list[str | list[str]]
    function: Annotated[ConvertData | TransformersData | UnnamedData, Field(discriminator="kind")]
    reason: str
    rules: tuple[str, ...] = ()


class CallData(_Part):
    """A `CallStep`."""

    kind: Literal["call"]
    target: str
    source: str
    shard_id: int | str | None = None
    rules: tuple[str, ...] = ()


class FindingData(_Part):
    """A `Finding`."""

    kind: str
    severity: Literal["error", "warning", "info"]
    message: str
    tensors: tuple[str, ...] = ()
    file: str | None = None
    hint: str | None = None


class ForecastData(_Part):
    """A `Forecast`."""

    bytes_to_read: Count
    reads: Count
    straight: Count
    buffered: Count
    assembled: Count
    computed: Count
    handed_over: Count
    contiguous: Count
    strided: Count
    extra_memory: Count


class PlanData(_Part):
    """A `LoadPlan`."""

    format: Literal["weightloaders plan"]
    version: Literal[1]
    ok: bool
    runnable: bool
    decided_by: list[str]
    forecast: ForecastData
    missing: list[str]
    unexpected: list[str]
    ignored: list[str]
    mismatched: list[str]
    unfilled: list[str]
    dropped: list[str]
    tied: dict[str, str]
    renamed: dict[str, str]
    cast: dict[str, tuple[str, str]]
    skipped_files: dict[str, str]
    findings: list[FindingData]
    fingerprint: FingerprintData
    model: ModelData
    source: SourceData
    steps: list[Annotated[CopyData | ComputeData | CallData, Field(discriminator="kind")]]


def fingerprint(model: ModelData, source: SourceData) -> FingerprintData:
    """The checksums of what a document says of model and source."""
    return FingerprintData(model=_checksum(_plain(model)), source=_checksum({**_plain(source), "root": ""}))


def _plain(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _checksum(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def text_of(data: PlanData) -> str:
    """The document as JSON text: a line for each step, tensor and finding."""
    return _lines(_plain(data), 0)


def _lines(value: Any, depth: int) -> str:
    if isinstance(value, dict) and (depth == 0 or any(map(_is_long, value.values()))):
        opened, closed, inside = "{", "}", [f"{json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in value.items()]
    elif _is_long(value):
        opened, closed, inside = "[", "]", [json.dumps(item) for item in value]
    else:
        return json.dumps(value)
    indent = "  " * (depth + 1)
    return f"{opened}\n{indent}" + f",\n{indent}".join(inside) + f"\n{'  ' * depth}{closed}"


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def parsed(text: str | bytes) -> PlanData:
    """A document from JSON text, held against its types and bounds.

    Raises:
        PlanError: If it is no plan, of another version, or damaged.
    """
    try:
        data = PlanData.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"this is no plan: {error}", hint="LoadPlan.to_json writes one") from error
    if fingerprint(data.model, data.source) != data.fingerprint:
        raise _damaged("what it says of model and source does not have the fingerprint that it names")
    return data


def _refusal(error: ValidationError) -> PlanError:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where, what = problem["loc"], problem["msg"]
    if where == ("version",) and problem["type"] == "literal_error":
        return PlanError(
            f"this plan is of another version than {VERSION}",
            hint="read it with the version of weightloaders that wrote it, or make the plan again",
        )
    if not where or where == ("format",):
        return PlanError(f"this is no plan: {what}", hint="LoadPlan.to_json writes one")
    return _damaged(f"{'.'.join(map(str, where))}: {what}")


def _damaged(what: str) -> PlanError:
    return PlanError(f"this plan is damaged: {what}", hint="make the plan again")
