"""`Placing`: holding tensors against what a model wants, and saying what does not fit and why."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import RuleError, SourceError, WeightLoadersError
from weightloaders.mapping import suggest
from weightloaders.mapping.symbolic import SymbolicTensor, Untraceable
from weightloaders.plan import (
    CallStep,
    ComputeStep,
    CopyStep,
    Finding,
    LoadPlan,
    Piece,
    Policies,
    Step,
    listed,
    step_targets,
)
from weightloaders.targets import Target, Targets, memory_span
from weightloaders.weights.reading import same_values

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from weightloaders.mapping.names import Claim, Group
    from weightloaders.weights.info import TensorInfo

# Casting among these is a matter of rounding; between any other two dtypes values would change their meaning.
_REAL_FLOATS = {torch.float64: 3, torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}


def may_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype may become another: real floating point only, never 8-bit codes or integers."""
    return source == target or (source in _REAL_FLOATS and target in _REAL_FLOATS)


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast loses precision or range."""
    return source != target and _REAL_FLOATS.get(source, 0) >= _REAL_FLOATS.get(target, 0)


@dataclass(slots=True)
class GroupState:
    """The sources of a group found so far: one list of (index, tensor, rules) a slot."""

    group: Group
    members: list[list[tuple[Any, Any]]]
    rules: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: Group) -> GroupState:
        """An empty one."""
        return cls(group, [[] for _ in group.slots])

    def problem(self, describe: Any = str) -> str | None:
        """Why the function can't be run: parts missing, twice, or indices that are not 0 to E-1."""
        absent = [slot for slot, members in zip(self.group.slots, self.members, strict=True) if not members]
        if absent:
            present = [describe(m) for members in self.members for _, m in members]
            return f"of the parts of {self.title}, {listed(absent)} is missing; there is {listed(present)}"
        sizes = set()
        for slot, is_list, members in zip(self.group.slots, self.group.lists, self.members, strict=True):
            if not is_list and len(members) > 1:
                return f"{len(members)} tensors take the place of {slot} in {self.title}"
            indices = sorted((index for index, _ in members), key=_sort_key)
            if is_list and self.group.indexed and indices != list(range(len(indices))):
                return (
                    f"the indices for {slot} in {self.title} are {listed([str(i) for i in indices])}, "
                    f"not 0 to {len(indices) - 1}: one is missing, repeated or misnumbered"
                )
            if is_list:
                sizes.add(len(members))
        if len(sizes) > 1:
            return f"the lists of parts of {self.title} have different lengths: {', '.join(map(str, sorted(sizes)))}"
        return None

    @property
    def title(self) -> str:
        """How the group is called in messages."""
        return listed(self.group.targets) if self.group.targets else self.group.rule

    def arguments(self) -> list[Any]:
        """What the function gets: one source a slot, or a tuple of them in index order."""
        result: list[Any] = []
        for is_list, members in zip(self.group.lists, self.members, strict=True):
            ordered = [member for _, member in sorted(members, key=lambda pair: _sort_key(pair[0]))]
            result.append(tuple(ordered) if is_list else ordered[0])
        return result


def _sort_key(index: Any) -> tuple[int, Any]:
    return (0, index) if isinstance(index, int) else (1, index)


class Placing:
    """Holds tensors, one by one, against what a model wants, and keeps the account.

    A catalogue is placed at once; a stream is placed as it comes.

    Attributes:
        plan: What has been found so far.
        filled: Name of a memory (see `Targets.canonical`) -> the source that fills it, and the name it came under.
    """

    def __init__(
        self,
        targets: Targets,
        policies: Policies,
        ignore_missing: re.Pattern[str] | None = None,
        ignore_unexpected: re.Pattern[str] | None = None,
    ) -> None:
        self.targets = targets
        self.policies = policies
        self.plan = LoadPlan()
        self.filled: dict[str, tuple[TensorInfo | None, str]] = {}
        # Targets that something was meant for and did not fit: they are not missing a second time.
        self._spoilt: set[str] = set()
        self._ignore_missing = ignore_missing
        self._ignore_unexpected = ignore_unexpected

    def place(self, name: str, info: TensorInfo, rules: tuple[str, ...]) -> None:
        """A tensor that is to fill the target of this name as it is."""
        target = self.targets.by_name.get(name)
        if target is None:
            self.plan.unexpected.append(info.name)
            return
        canonical = self.targets.canonical[name]
        if canonical in self.filled:
            self._second_source(target, info, *self.filled[canonical])
        elif not self._fits(target, info.shape, info.dtype, info):
            self._spoilt.add(canonical)
        else:
            self.filled[canonical] = (info, info.name)
            pieces = (Piece(info, 0, 0, info.numel),) if info.numel else ()
            self.plan.steps.append(CopyStep(target, pieces, rules))

    def hand_over(self, info: TensorInfo, claim: Claim) -> None:
        """A tensor that the parameter's own loader is to take."""
        self.plan.steps.append(CallStep(self.targets.by_name[claim.target], info, claim.shard_id, claim.rules))
        self.filled.setdefault(self.targets.canonical[claim.target], (None, claim.target))

    def _second_source(self, target: Target, info: TensorInfo, other: TensorInfo | None, other_name: str) -> None:
        """One memory, two sources: fine where they are equal, an error where they are not."""
        try:
            equal = other is not None and same_values(info, other)
        except SourceError as error:
            self.plan.findings.append(Finding("conflict", "error", error.message, (info.name,), error.file, error.hint))
            return
        if equal:
            self.plan.tied[target.name] = self.targets.canonical[target.name]
            return
        self.plan.findings.append(
            Finding(
                "conflict", "error",
                f"both {other_name!r} and {info.name!r} would fill {target.name!r}, with different values",
                (info.name, other_name), _file_of(info),
                "drop one with a rule, e.g. " + f"Drop({info.name!r})"
                + (", or untie the model's parameters" if self.targets.tied_to(target.name) else ""),
            )
        )  # fmt: skip

    def _fits(self, target: Target, shape: Sequence[int], dtype: torch.dtype, info: TensorInfo) -> bool:
        severity = self.policies.mismatched(target.name)
        if tuple(shape) != target.shape:
            self.plan.mismatched.append(target.name)
            cause, hint = _shape_cause(target, tuple(shape))
            self.plan.findings.append(
                Finding(
                    "shape", severity,
                    f"{target.name}: the source has {list(shape)}, the model wants {list(target.shape)}{cause}",
                    (target.name,), _file_of(info), hint,
                )
            )  # fmt: skip
            return False
        if not may_cast(dtype, target.dtype):
            self.plan.mismatched.append(target.name)
            self.plan.findings.append(
                Finding(
                    "dtype", severity,
                    f"{target.name}: the source has {dtype} values, which can't become {target.dtype} by a cast",
                    (target.name,), _file_of(info),
                    "integers and 8-bit codes are usually quantised weights: load them into a model built for that "
                    "quantisation, or convert the checkpoint first",
                )
            )  # fmt: skip
            return False
        stored = info.extents[0].stored_dtype if info.is_raw and info.extents else info.dtype
        if stored != target.dtype or dtype != target.dtype:
            self.plan.cast[target.name] = (stored, target.dtype)
        return True

    # -- groups

    def place_group(self, state: GroupState) -> None:
        """Tensors that become others together."""
        members = [info for slot in state.members for _, info in slot]
        problem = state.problem(lambda info: info.name)
        if problem is not None:
            known = [t for t in state.group.targets if t in self.targets.by_name]
            if not known and state.group.targets:
                self.plan.unexpected.extend(info.name for info in members)
                return
            severity = self.policies.missing(known[0]) if known else "error"
            self.plan.findings.append(
                Finding(
                    "incomplete", severity, problem, tuple(known or [m.name for m in members[:1]]), _file_of(members[0]),
                    "look for the missing part under another name, or in a shard that is absent",
                )
            )  # fmt: skip
            self.plan.missing.extend(known)
            self._spoilt.update(self.targets.canonical[name] for name in known)
            return
        try:
            steps = self._steps_of(state)
        except WeightLoadersError as error:
            self.plan.findings.append(
                Finding("rule", "error", error.message, tuple(m.name for m in members[:1]), hint=error.hint)
            )
            self._spoilt.update(self.targets.canonical[t] for t in state.group.targets if t in self.targets.by_name)
            return
        for step in steps:
            for target in step_targets(step):
                canonical = self.targets.canonical[target.name]
                if canonical in self.filled:
                    self._second_source(target, members[0], *self.filled[canonical])
                self.filled[canonical] = (None, target.name)
        self.plan.steps.extend(steps)

    def _steps_of(self, state: GroupState) -> list[Step]:
        arguments = state.arguments()
        infos = [i for a in arguments for i in (a if isinstance(a, tuple) else (a,))]
        numbers = {id(info): number for number, info in enumerate(infos)}
        try:
            symbols = _mapped(arguments, lambda i: SymbolicTensor.of(numbers[id(i)], i.shape, i.dtype))
            results = state.group.function(symbols)
            if not all(isinstance(r, SymbolicTensor) for r in results.values()):
                raise Untraceable("a result that does not come from the source")
            reason = ""
        except WeightLoadersError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever foreign code does with a symbol, real tensors decide
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            results = _on_meta(state, arguments)
        known = self._known_targets(results, infos)
        if not known:
            return []
        if reason:
            return [ComputeStep(known, tuple(arguments), state.group.function, state.rules, reason)]
        return [
            CopyStep(target, _pieces(results[name], infos), state.rules)  # type: ignore[arg-type] -- symbols, see above
            for name, target in known.items()
        ]

    def _known_targets(self, results: Mapping[str, torch.Tensor], infos: Sequence[TensorInfo]) -> dict[str, Target]:
        known: dict[str, Target] = {}
        for name, result in results.items():
            target = self.targets.by_name.get(name)
            if target is None:
                self.plan.unexpected.append(name)
            elif self._fits(target, tuple(result.shape), result.dtype, infos[0]):
                known[name] = target
            else:
                self._spoilt.add(self.targets.canonical[name])
        return known

    # -- what is left

    def finish(self, infos: Mapping[str, TensorInfo]) -> None:
        """Everything has been placed: what is missing, what is unexpected, and whether anything fitted at all."""
        self._account_for_rest(infos)
        self._explain_unexpected(infos)
        if self.filled or not self.targets.by_name or not self.plan.ok:
            return
        if not infos:
            self.plan.findings.append(Finding("nothing", "error", "the source holds no tensors"))
            return
        self.plan.findings.append(
            Finding(
                "nothing", "error", f"nothing in the source fits this model: none of {len(infos)} tensors was matched",
                tuple(infos)[:1], hint=self._prefix_hint(list(infos)),
            )
        )  # fmt: skip

    def _account_for_rest(self, infos: Mapping[str, TensorInfo]) -> None:
        plan, filled = self.plan, self.filled
        by_other_names = self._filled_through_other_names(set(filled))
        absent: dict[str, list[str]] = {"error": [], "warning": [], "info": []}
        for name, target in self.targets.by_name.items():
            canonical = self.targets.canonical[name]
            if canonical in filled:
                if canonical != name and filled[canonical][1] != name:
                    plan.tied.setdefault(name, canonical)
            elif canonical in self._spoilt:
                plan.unfilled.append(name)
            elif name in by_other_names:
                plan.tied[name] = by_other_names[name]
            elif self.targets.is_derived(name):
                plan.findings.append(
                    Finding("derived", "info", f"{name} is not in the source; it is computed", (name,))
                )
                plan.unfilled.append(name)
            elif self._ignore_missing is not None and self._ignore_missing.search(name):
                plan.unfilled.append(name)
            elif canonical == name or target.tensor.numel() == 0:
                absent[self.policies.missing(name)].append(name)
        for severity, names in absent.items():
            plan.missing.extend(names)
            plan.unfilled.extend(names)
            if names:
                plan.findings.append(self._missing_finding(severity, names, infos))
        plan.unfilled = list(dict.fromkeys(plan.unfilled))

    def _filled_through_other_names(self, filled: set[str]) -> dict[str, str]:
        """Names whose value comes with another's: declared ties, and views of memory that others fill entirely."""
        ties = self.targets.declared_ties
        partners: dict[str, list[str]] = defaultdict(list)
        for name, other in ties.items():
            partners[other].append(name)
        result: dict[str, str] = {}
        for source, names in partners.items():
            group = [source, *names]
            present = next((n for n in group if self.targets.canonical.get(n) in filled), None)
            if present is not None:
                result.update({n: present for n in group if n != present})
        spans = sorted(
            (span, name) for name in filled if (span := memory_span(self.targets.by_name[name].tensor)) is not None
        )
        for name, target in self.targets.by_name.items():
            span = memory_span(target.tensor)
            if self.targets.canonical[name] not in filled and span is not None and _covered(span, spans):
                result[name] = next(n for (start, end), n in spans if start < span[1] and end > span[0])
        return result

    def _missing_finding(self, severity: Any, names: list[str], infos: Mapping[str, TensorInfo]) -> Finding:
        plan = self.plan
        total = len(self.targets.by_name)
        message = f"{len(names)} of {total} parameters are not in the source: {listed(names)}"
        file = None
        hint: str | None = None
        if plan.unexpected:
            rename = suggest.prefix_suggestion(plan.unexpected, names)
            if rename is not None:
                hint = f"the names differ by a prefix: load with rules=[Rename({str(rename.old)!r}, {rename.new!r})]"
            else:
                near = suggest.nearest(names[0], plan.unexpected)
                if near is not None:
                    hint = f"the nearest name in the source is {near!r}; if it is the same, rename it with a rule"
        if hint is None and len(names) < total:
            # A neighbour in the same module tells which file the tensor should be in.
            file = self._neighbour_file(names[0])
            hint = (
                "the checkpoint is incomplete: fetch or export it again, or allow it with "
                f"on_missing={{{names[0]!r}: 'warn'}} to have it initialised instead"
            )
        return Finding("missing", severity, message, tuple(names), file, hint)

    def _neighbour_file(self, name: str) -> str | None:
        module = name.rpartition(".")[0].rpartition(".")[0]
        for step in self.plan.steps:
            if isinstance(step, CopyStep) and step.pieces and step.target.name.startswith(module):
                return _file_of(step.pieces[0].info)
        return None

    def _explain_unexpected(self, infos: Mapping[str, TensorInfo]) -> None:
        plan = self.plan
        plan.unexpected = [
            name for name in dict.fromkeys(plan.unexpected)
            if not self.targets.is_derived(name)
            and not (self._ignore_unexpected is not None and self._ignore_unexpected.search(name))
        ]  # fmt: skip
        sorted_out: dict[Any, list[str]] = defaultdict(list)
        for name in plan.unexpected:
            sorted_out[self.policies.unexpected(name)].append(name)
        for severity, names in sorted_out.items():
            info = infos.get(names[0])
            plan.findings.append(
                Finding(
                    "unexpected", severity, f"{len(names)} tensors of the source are not wanted by the model: {listed(names)}",
                    tuple(names), _file_of(info) if info else None, _unexpected_cause(names),
                )
            )  # fmt: skip

    def _prefix_hint(self, names: Sequence[str]) -> str:
        rename = suggest.prefix_suggestion(names, list(self.targets.by_name))
        if rename is not None:
            return f"the names differ by a prefix: load with rules=[Rename({str(rename.old)!r}, {rename.new!r})]"
        return (
            f"the source's names begin like {names[0]!r}, the model's like {next(iter(self.targets.by_name))!r}: "
            "is it the checkpoint of another model?"
        )


# ------------------------------------------------------------------ helpers


def _mapped(arguments: Sequence[Any], function: Any) -> list[Any]:
    return [[function(i) for i in a] if isinstance(a, tuple) else function(a) for a in arguments]


def _on_meta(state: GroupState, arguments: Sequence[Any]) -> Mapping[str, torch.Tensor]:
    """Names, shapes and dtypes of a function's results, without values."""
    tensors = _mapped(arguments, lambda i: torch.empty(i.shape, dtype=i.dtype, device="meta"))
    try:
        return state.group.function(tensors)
    except WeightLoadersError:
        raise
    except Exception as error:
        shapes = _mapped(arguments, lambda i: list(i.shape))
        raise RuleError(
            f"{state.group.rule} can't be applied to tensors of shapes {listed([str(s) for s in shapes])}: {error}",
            hint="check the rule's sizes against the model's config; a rule may not look at values",
        ) from error


def _pieces(symbol: SymbolicTensor, infos: Sequence[TensorInfo]) -> tuple[Piece, ...]:
    pieces, at = [], 0
    for run in symbol.runs:
        pieces.append(Piece(infos[run.source], run.start, at, run.length))
        at += run.length
    return tuple(pieces)


def _file_of(info: TensorInfo) -> str | None:
    return info.extents[0].source.name if info.extents else None


def _covered(span: tuple[int, int], spans: Sequence[tuple[tuple[int, int], str]]) -> bool:
    at, end = span
    for (start, stop), _ in spans:
        if start <= at < stop:
            at = stop
        if at >= end:
            return True
    return False


def _shape_cause(target: Target, shape: tuple[int, ...]) -> tuple[str, str | None]:
    """The likely cause of a mismatch, and what to do about it."""
    wanted = target.shape
    if math.prod(shape) in (0, 1) and math.prod(wanted) > 1:
        return " (a placeholder)", (
            "the file was saved from a model whose parameters were partitioned (ZeRO-3) and not gathered; gather and save again"
        )
    if len(shape) == len(wanted) == 2 and shape == wanted[::-1]:
        return " (it looks transposed)", f"load with rules=[Convert({target.name!r}, {target.name!r}, 'transpose')]"
    if len(shape) == len(wanted) and shape[1:] == wanted[1:]:
        rows, want = shape[0], wanted[0]
        if any(word in target.name for word in ("embed", "lm_head", "wte", "vocab", "output.weight")):
            return f" (vocabularies of {rows} and {want})", (
                f"set the model's vocab_size to {rows}"
                + (f", or pad the checkpoint with Convert(..., 'pad_rows', rows={want})" if want > rows else "")
            )
        if want % rows == 0 and want // rows in (2, 4, 8, 16, 32):
            return f" (1/{want // rows} of it)", "the file looks like one rank's part of a tensor-parallel checkpoint"
    if len(shape) == len(wanted) and sum(a != b for a, b in zip(shape, wanted, strict=True)) == 1:
        return "", "the checkpoint is of a model of another size: compare its config.json with the model's"
    return "", "the checkpoint and the model are of different architectures or sizes: compare their configs"


def _unexpected_cause(names: Sequence[str]) -> str | None:
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    if any("lora_" in name for name in names):
        return "these are a LoRA adapter's: merge the adapter into its base model first"
    if leaves & {"qweight", "qzeros", "scales", "g_idx", "absmax", "weight_scale", "weight_scale_inv", "weight_packed"}:
        return "these belong to a quantised checkpoint: build the model with its quantization_config"
    return None
