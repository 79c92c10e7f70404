"""Parameters that one keeps fused and another apart: found by their names, with the rule that leads from each to each.

Which rows of a fused parameter are whose can't be seen from its name, so a rule is only suggested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from inspect import signature

from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config

_ATTENTION = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"), ("q_lin", "k_lin", "v_lin"), ("query_proj", "key_proj", "value_proj"),
)  # fmt: skip
_MLP = (("gate_proj", "up_proj"), ("gate", "up"), ("w1", "w3"))
# Fused name -> its layout, and what its parts may be called.
_FAMILIES = {
    **dict.fromkeys(("qkv_proj", "qkv", "to_qkv", "wqkv", "Wqkv", "W_pack", "c_attn", "attn_qkv"), ("qkv", _ATTENTION)),
    # GPT-NeoX, BLOOM and Falcon go group by group.
    "query_key_value": ("qkv_interleaved", _ATTENTION),
    **dict.fromkeys(("gate_up_proj", "gate_up", "gate_and_up_proj", "w13"), ("gate_up", _MLP)),
}

Shapes = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Fusion:
    """One parameter on one side that is several on the other.

    Attributes:
        at: The position of the segment in which the names differ.
        fused: The fused parameter's name.
        parts: The names of its parts.
        layout: The ready-made layouts for it, without ``fuse_`` or ``split_``.
    """

    at: int
    fused: str
    parts: tuple[str, ...]
    layout: str

    def segment(self, name: str) -> str:
        """What tells one of these names from the others."""
        return name.split(".")[self.at]

    def pattern(self, name: str) -> str:
        """What stands for one of these names in a rule for all layers."""
        segments = name.split(".")
        behind = len(segments) - self.at - 1
        tail = ["*"] if behind == 1 else ["**"] if behind else []
        return ".".join(["**", segments[self.at], *tail])


def fusions(fused_side: Collection[str], parts_side: Collection[str]) -> Iterator[Fusion]:
    """What the first of two sets of names has fused and the second in parts."""
    there = set(parts_side)
    for name in fused_side:
        segments = name.split(".")
        for at, segment in enumerate(segments):
            layout, spellings = _FAMILIES.get(segment, ("", ()))
            for spelling in spellings:
                parts = tuple(".".join((*segments[:at], part, *segments[at + 1 :])) for part in spelling)
                if there.issuperset(parts):
                    yield Fusion(at, name, parts, layout)


def fusion_hint(names: Collection[str], wanted: Collection[str], shape_of: Shapes, config: object) -> str | None:
    """The rules that would make names those wanted, if they are the same parameters fused, or taken apart.

    Args:
        names: Names of the source.
        wanted: Names of the model.
        shape_of: The shape of a tensor of either.
        config: The model's config, which tells how many heads it has.
    """
    kinds: dict[str, list[tuple[str, Fusion]]] = {}
    made: set[str] = set()
    for verb, found in (("fuse", fusions(wanted, names)), ("split", fusions(names, wanted))):
        for fusion in found:
            made.update((fusion.fused,) if verb == "fuse" else fusion.parts)
            kinds.setdefault(f"{verb} {fusion.pattern(fusion.fused)}", []).append((verb, fusion))
    if not kinds:
        return None
    first = [alike[0] for alike in kinds.values()]
    said = (
        f"what is {', '.join(f.segment(part) for part in f.parts)} to the {'source' if verb == 'fuse' else 'model'} "
        f"is {f.segment(f.fused)} to the {'model' if verb == 'fuse' else 'source'}"
        for verb, f in first
    )
    own_function = [any(_lies_side_by_side(f, shape_of) for _, f in alike) for alike in kinds.values()]
    rules = [_rule(verb, f, config, own) for (verb, f), own in zip(first, own_function, strict=True)]
    hint = f"{'; '.join(dict.fromkeys(said))}: load with rules=[{', '.join(rules)}]"
    if any(own_function):
        hint += "; the function is to be yours, since the parts lie side by side, not one below the other (Conv1D)"
    if any("..." in rule for rule in rules):
        hint += " with the model's numbers in the place of each ..."
    if any("_interleaved" in rule for rule in rules):
        hint += "; leave out _interleaved if the parts don't take turns group by group (as in BLOOM, Falcon, GPT-NeoX)"
    rest = [name for name in wanted if name not in made]
    more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
    return hint + (f"; still missing would be {rest[0]}{more}" if rest else "")


def _rule(verb: str, fusion: Fusion, config: object, own_function: bool) -> str:
    parts, fused = [fusion.pattern(name) for name in fusion.parts], fusion.pattern(fusion.fused)
    layout = f"{verb}_{fusion.layout}"
    arguments = "function" if own_function else repr(layout)
    if not own_function:
        wanted = [name for name in ("heads", "kv_heads", "head_dim") if name in signature(LAYOUTS[layout]).parameters]
        told = sizes_from_config(config, wanted)
        arguments += "".join(f", {name}={told.get(name, '...')}" for name in wanted)
    sources, targets = (parts, fused) if verb == "fuse" else (fused, parts)
    return f"Convert({sources!r}, {targets!r}, {arguments})"


def _lies_side_by_side(fusion: Fusion, shape_of: Shapes) -> bool:
    """Whether a fused matrix can only have its parts one beside the other, transposed."""
    fused, shapes = shape_of(fusion.fused), [shape_of(name) for name in fusion.parts]
    if len(fused) != 2 or any(len(shape) != 2 for shape in shapes):
        return False
    rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
    return fused == (columns, rows) != (rows, columns)
