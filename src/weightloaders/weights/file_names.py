"""What a file's name says about it: format, role, precision variant, place in a numbered set."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

Family = Literal["safetensors", "torch"]

# Within a family, the earlier suffix wins where a folder holds several.
SUFFIXES: dict[Family, tuple[str, ...]] = {"safetensors": (".safetensors",), "torch": (".bin", ".pt", ".pth")}

# Weights that other loaders or other libraries read, for saying so.
OTHER_FORMATS = {
    ".gguf": "GGUF, which the loader 'gguf' (package weightloaders-gguf) reads",
    ".npz": "NumPy's, which the loader 'npz' (package weightloaders-npz) reads",
    ".h5": "TensorFlow's, which no loader here reads",
    ".msgpack": "Flax's, which no loader here reads",
    ".onnx": "ONNX, which no loader here reads",
    ".distcp": "torch.distributed.checkpoint's, which the loader 'dcp' (package weightloaders-dcp) reads",
    ".tensors": "tensorizer's, which the loader 'tensorizer' (package weightloaders-engines) reads",
}

# What a rank of several wrote for itself: slices under the names of whole tensors, which nobody must take for these.
_OF_A_RANK = (
    (
        re.compile(r"model-rank-\d+-part-\d+\.safetensors"),
        "sharded_state",
        "a rank's part of vLLM's sharded state, which the loader 'sharded_state' (package weightloaders-dcp) reads",
    ),
    (
        re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors"),
        "dcp",
        "a rank's part of torch.distributed.checkpoint's, which the loader 'dcp' (package weightloaders-dcp) reads",
    ),
)
# Loaders of packages of their own, by the suffix of what they read.
_READERS = {".gguf": "gguf", ".npz": "npz", ".distcp": "dcp", ".tensors": "tensorizer"}
# Meta's tensor-parallel parts, and the sizes of the whole.
PARAMS_FILE = "params.json"
#: The file that tells a folder with an adapter (LoRA or the like), and what to do with one.
ADAPTER_FILE = "adapter_config.json"
ADAPTER_HINT = "merge it into its base model (peft: merge_and_unload()), save that and load it"
_PART = re.compile(r"consolidated\.(\d{1,4})\.(pth|pt)", re.IGNORECASE)

# What trainers (transformers, accelerate, DeepSpeed) write beside a model.
_TRAINING_STATE = re.compile(
    r"(training_args|optimizer|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|trainer_state)"
    r"([._-].*|\d.*)?|.*optim_states?\.\w+",
    re.IGNORECASE,
)
_ADAPTER = re.compile(r"adapter(_model|s)?([._-].*)?|.*lora_weights.*", re.IGNORECASE)
# transformers writes model-00001-of-00002, others with underscores or dots; some count from zero.
_NUMBER = re.compile(r"[-_.](\d{1,9})[-_]of[-_](\d{1,9})(?!\d)")
_VARIANT = re.compile(r"(b?fp?|b?float|int|nf|mxfp|nvfp)\d+\w*|(no_|non_)?ema", re.IGNORECASE)
_INDEX = re.compile(
    r"(?P<stem>.+)(?P<suffix>\.(safetensors|bin|pt|pth))\.index(?P<variant>\.\w+)?\.json", re.IGNORECASE
)


def suffix_of(name: str) -> str:
    """The last suffix in lower case, e.g. ``".safetensors"``; empty where there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def family_of(name: str) -> Family | None:
    """The family that a name's suffix stands for."""
    suffix = suffix_of(name)
    return next((family for family, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def indexed_name(name: str) -> str | None:
    """The file that an index stands in for, had it not been split; None where the name is no index's.

    ``model.safetensors.index.json`` → ``model.safetensors``, ``model.safetensors.index.fp16.json`` →
    ``model.fp16.safetensors``.
    """
    match = _INDEX.fullmatch(name)
    return match and match["stem"] + (match["variant"] or "") + match["suffix"]


def names_weights(name: str) -> bool:
    """Whether a name ends like that of a weights file, in whichever format, or of an index of some."""
    return family_of(name) is not None or indexed_name(name) is not None or suffix_of(name) in OTHER_FORMATS


def is_training_state(name: str) -> bool:
    """Whether it is an optimizer's, a scheduler's or another part of a trainer's state."""
    return _TRAINING_STATE.fullmatch(name) is not None


def is_adapter(name: str) -> bool:
    """Whether it speaks of an adapter (LoRA) rather than of a whole model."""
    return _ADAPTER.fullmatch(name) is not None


def is_consolidated(name: str) -> bool:
    """Whether it is the second copy, with the original code's names, that some repositories carry."""
    return re.match(r"consolidated(?![a-z0-9])", name, re.IGNORECASE) is not None


def part_number(name: str) -> int | None:
    """The number of a tensor-parallel part, 1 for ``consolidated.01.pth``; None where the name is no part's."""
    match = _PART.fullmatch(name)
    return match and int(match[1])


def said_beside(files: Iterable[str], names: Container[str]) -> list[str]:
    """What lies beside chosen files and says how they are read: ``params.json``, of tensor-parallel parts."""
    return [PARAMS_FILE] if PARAMS_FILE in names and any(part_number(file) is not None for file in files) else []


def of_a_rank(name: str) -> str | None:
    """What a file is that one rank of several wrote for itself, and who reads it; None where the name is no such."""
    return next((what for pattern, _, what in _OF_A_RANK if pattern.fullmatch(name)), None)


def reader_of(name: str) -> str | None:
    """The loader, in a package of its own, that reads what is called so; None where the name tells of none."""
    of_rank = next((loader for pattern, loader, _ in _OF_A_RANK if pattern.fullmatch(name)), None)
    return of_rank or _READERS.get(suffix_of(name))


class Number(NamedTuple):
    """The place of a file in a numbered set.

    Attributes:
        base: The name with number and total starred: the same for every split of one checkpoint.
        set: The name with the number starred.
        number: The file's own number.
        of: How many files the set has, as the name claims.
    """

    base: str
    set: str
    number: int
    of: int


def number_of(name: str) -> Number | None:
    """The place that a name claims, e.g. 2 of 3 for ``model-00002-of-00003.safetensors``; None if it claims none."""
    match = _NUMBER.search(name)
    if match is None:
        return None
    before, between, after = name[: match.start(1)], name[match.end(1) : match.start(2)], name[match.end(2) :]
    return Number(f"{before}*{between}*{after}", f"{before}*{between}{match[2]}{after}", int(match[1]), int(match[2]))


def gaps(files: Iterable[str], names: Iterable[str]) -> str | None:
    """What the numbered sets among files lack, as a sentence; None if nothing.

    Args:
        files: The files in question.
        names: All names that may fill a gap (a pattern may pick a part of a set on purpose).
    """
    there: dict[str, set[int]] = defaultdict(set)
    for number in filter(None, map(number_of, names)):
        there[number.set].add(number.number)
    for name, of in {number.set: number.of for number in filter(None, map(number_of, files))}.items():
        first = 0 if 0 in there[name] else 1
        # Counted, not listed: the total is a mere claim, and may be absurd.
        count = of - sum(first <= number < first + of for number in there[name])
        if count:
            missing = itertools.islice((n for n in itertools.count(first) if n not in there[name]), min(count, 6))
            more = f" and {count - 6} more" if count > 6 else ""
            return f"{name} lacks {count} of its {of} files: number {', '.join(map(str, missing))}{more}"
    return None


class Variant(NamedTuple):
    """A name taken apart at its precision variant."""

    base: str
    variant: str | None


def variant_of(name: str, wanted: str | None = None) -> Variant:
    """``model.fp16-00001-of-00002.safetensors`` → ``("model.safetensors", "fp16")``.

    Args:
        name: A file name.
        wanted: A variant that counts as one whatever it is called; others count if they name a precision.
    """
    suffix = suffix_of(name)
    stem, dot, last = _NUMBER.sub("", name[: len(name) - len(suffix)]).rpartition(".")
    if dot and (last == wanted or _VARIANT.fullmatch(last)):
        return Variant(stem + suffix, last)
    return Variant(stem + dot + last + suffix, None)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which ``part-2`` comes before ``part-10``."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]
