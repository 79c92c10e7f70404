"""What to do about names that one side lacks: which rule makes up for it, or which part of a model it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightloaders.mapping import suggest
from weightloaders.mapping.fusions import fusion_hint
from weightloaders.mapping.rules import Rename
from weightloaders.placing.sizes import layers_short
from weightloaders.plan import listed, step_infos

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from weightloaders.placing.placing import Placing
    from weightloaders.weights.info import TensorInfo


def mapping_hint(
    placing: Placing, names: Sequence[str], wanted: Collection[str], infos: Mapping[str, TensorInfo]
) -> str | None:
    """The exact rule that would make names those wanted, and what it would leave missing."""
    shapes = {name: info.shape for name, info in infos.items()}
    shapes.update((name, placing.targets.by_name[name].shape) for name in wanted)
    fused = fusion_hint(names, wanted, shapes.__getitem__, getattr(placing.targets.model, "config", None))
    if fused is not None:
        return fused
    rename = suggest.prefix_suggestion(names, wanted) if names else None
    if rename is None:
        return None
    rename = _of_all(rename, infos, placing.targets.by_name) or rename
    mended = {suggest.plainly_renamed(rename, name) for name in names}
    rest = [name for name in wanted if name not in mended]
    old, new = str(rename.old), rename.new
    how = f"begin with {old + '.'!r} where the model's begin with {new + '.'!r}" if old and new else (
        f"begin with {old + '.'!r}, the model's don't" if old else f"lack the prefix {new + '.'!r} of the model's"
    )  # fmt: skip
    hint = f"the names differ by a prefix (the source's {how}): load with rules=[Rename({old!r}, {new!r})]"
    return hint + (f"; still missing would be {listed(rest)}" if rest and len(rest) < len(wanted) else "")


def _of_all(rename: Rename, names: Collection[str], own: Collection[str]) -> Rename | None:
    """A shorter prefix that, stripped, makes all of the source's names the model's.

    Where the model has names with that prefix too, some of the source's are taken as they are, which are not meant so.
    """
    segments = str(rename.old).split(".")
    for cut in range(1, len(segments)):
        shorter = Rename(".".join(segments[:cut]), rename.new)
        if all(suggest.plainly_renamed(shorter, name) in own for name in names):
            return shorter
    return None


def absent_part(placing: Placing, names: Sequence[str]) -> str | None:
    """What to do where the source has all but a part of the model that a checkpoint may well lack: layers, a head."""
    config = getattr(placing.targets.model, "config", None)
    numbers = layers_short(names, placing.fillers.values())
    if numbers is not None:
        return (
            f"the source has {_layers(numbers[0])}, the model {numbers[1]}: build it with the checkpoint's own config "
            f"({_field(config, 'num_hidden_layers', numbers[1])}={numbers[0]}), or fetch the rest of the checkpoint"
        )
    absent = dict.fromkeys(name.split(".")[0] for name in names)
    present = dict.fromkeys(name.split(".")[0] for name in placing.fillers.values())
    there = present.keys() | {name.split(".")[0] for name in placing.plan.unexpected}
    if 2 * len(names) > len(placing.targets.by_name) or any(part in there or part.isdecimal() for part in absent):
        return None
    policies = ", ".join(f"{part!r}: 'warn'" for part in absent)
    tie = (
        "; or if it is the embedding once more, tie it by tie_word_embeddings=True in the config"
        if "lm_head" in absent and getattr(config, "tie_word_embeddings", True) is False
        else ""
    )
    return (
        f"the source has all of {listed(list(present))} and nothing of {listed(list(absent))}: it is of a model "
        f"without this part. To train that afterwards, have it initialised: on_missing={{{policies}}}{tie}; else the "
        "checkpoint is incomplete: fetch or export it again"
    )


def surplus_part(placing: Placing, names: Sequence[str]) -> str | None:
    """What to do where the source is of a larger model: with more layers, or a head."""
    plan = placing.plan
    unexpected = set(plan.unexpected)
    used = [info.name for step in plan.steps for info in step_infos(step) if info.name not in unexpected]
    numbers = layers_short(names, used)
    if numbers is not None:
        config = getattr(placing.targets.model, "config", None)
        return (
            f"the source has {_layers(numbers[1])}, the model {numbers[0]}: unless that is what you want, build it "
            f"with {_field(config, 'num_hidden_layers', numbers[0])}={numbers[1]}"
        )
    own = {name.split(".")[0] for name in placing.targets.by_name}
    surplus = dict.fromkeys(name.split(".")[0] for name in names)
    if plan.missing or plan.mismatched or not used or any(part in own or part.isdecimal() for part in surplus):
        return None
    policies = ", ".join(f"{part!r}: 'ignore'" for part in surplus)
    return (
        f"the source is of a model that has {listed(list(surplus))} besides, and all of this one is in it: build that "
        f"model if you need it, or say that you don't: on_unexpected={{{policies}}}"
    )


def _layers(number: int) -> str:
    return f"{number} layer{'' if number == 1 else 's'}"


def _field(config: Any, field: str, value: int) -> str:
    """What the model's config calls one of its sizes."""
    renamed = str(getattr(config, "attribute_map", {}).get(field, field))
    return renamed if getattr(config, renamed, value) == value else field
