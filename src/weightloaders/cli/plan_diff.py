"""``weightloaders plan SRC --diff OTHER``: what is read differently where a model is filled from another source."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weightloaders.cli.common import counted, say, say_json, say_table
from weightloaders.cli.plan_ways import forecast_text, ways_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightloaders.cli.plan_ways import Way
    from weightloaders.plan import LoadPlan
    from weightloaders.weights.info import TensorInfo

# The number of a layer or an expert, and a run of sources that are named in a table.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """In what two plans for one model differ.

    Attributes:
        name: The parameter; or a tensor that one source alone has.
        kind: ``"filled"``, ``"names"``, ``"shape"``, ``"dtype"``, ``"layout"`` or ``"only in one"``.
        a: What it is with the first source.
        b: What it is with the other.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""


def say_difference(a: LoadPlan, b: LoadPlan, sources: tuple[str, str], *, json: bool) -> bool:
    """Print what differs.

    Returns:
        Whether anything does.
    """
    found = [*_differences(a, b)]
    same = len(a.targets) - len({difference.name for difference in found} & a.targets.keys())
    if json:
        say_json(
            {
                "a": sources[0],
                "b": sources[1],
                "parameters": len(a.targets),
                "same": same,
                "differences": [asdict(difference) for difference in found],
                "forecast": {"a": asdict(a.forecast), "b": asdict(b.forecast)},
            }
        )
        return bool(found)
    if found:
        say_table(["name", "differs in", "SRC", "OTHER"], _rows(found))
        say("")
    for label, plan in (("SRC", a), ("OTHER", b)):
        say(f"{label}: {'fits' if plan.ok else 'does not fit'}, {forecast_text(plan)}")
    are = "is" if same == 1 else "are"
    say(f"{same:,} of {counted(len(a.targets), 'parameter')} {are} filled in the same way")
    return bool(found)


def _differences(a: LoadPlan, b: LoadPlan) -> Iterator[Difference]:
    others = ways_of(b)
    for name, way in ways_of(a).items():
        yield from _differing(way, others[name])
    for one, other, is_first in ((a, b, True), (b, a, False)):
        used = {info.name for way in ways_of(one).values() for info in way.sources}
        elsewhere = {info.name for info in other.catalogue}
        for info in one.catalogue:
            # What is used under another name has been told of as that.
            if info.name not in elsewhere and info.name not in used:
                text = f"{_described(info)}, not used"
                yield Difference(info.name, "only in one", text if is_first else "", "" if is_first else text)


def _differing(a: Way, b: Way) -> Iterator[Difference]:
    """In what two ways of filling a parameter differ."""
    name = a.target.name
    if bool(a.steps) != bool(b.steps) or (not a.steps and a.how != b.how):
        yield Difference(name, "filled", a.how, b.how)
        return
    one, other = a.sources, b.sources
    for kind, told in (
        ("names", lambda info: info.name),
        ("shape", lambda info: list(info.shape)),
        ("dtype", _dtype),
    ):
        if list(map(told, one)) != list(map(told, other)):
            yield Difference(name, kind, _listed(one, told), _listed(other, told))
    if _layout(a) != _layout(b):
        by = ("", "") if a.how != b.how else (f", by {_rules(a)}", f", by {_rules(b)}")
        yield Difference(name, "layout", a.how + by[0], b.how + by[1])


def _dtype(info: TensorInfo) -> str:
    stored = info.extents[0].stored_dtype if info.is_raw and info.extents else info.dtype
    return str(stored).removeprefix("torch.")


def _described(info: TensorInfo) -> str:
    return f"{_dtype(info)} {list(info.shape)}"


def _layout(way: Way) -> list[Any]:
    from weightloaders.plan import CopyStep

    return [step.placements if isinstance(step, CopyStep) else (way.how, step.rules) for step in way.steps]


def _rules(way: Way) -> str:
    return "; ".join(rule for step in way.steps for rule in step.rules) or "no rule"


def _listed(infos: list[TensorInfo], told: Any) -> str:
    texts = list(dict.fromkeys(str(told(info)) for info in infos))
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _rows(found: list[Difference]) -> Iterator[tuple[str, str, str, str]]:
    """A line for all that differ in nothing but the number of a layer or an expert."""
    alike: dict[tuple[str, ...], list[Difference]] = defaultdict(list)
    for difference in found:
        told = difference.kind, *(_NUMBER.sub("*", text) for text in (difference.name, difference.a, difference.b))
        alike[told].append(difference)
    for (kind, name, a, b), members in alike.items():
        if len(members) == 1:
            only = members[0]
            yield only.name, kind, only.a, only.b
        else:
            yield f"{name} ({len(members):,})", kind, a, b
