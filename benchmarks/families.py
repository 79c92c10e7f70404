"""Every CausalLM, ImageTextToText and Seq2Seq class of transformers, built small: in and out again to the bit?

For each class its default config is shrunk, the model built with random weights and saved by transformers itself (so
the files have the hub's names). Then the plan must have nothing missing, unexpected or mismatched, and the model that
weightloaders builds must equal the one that transformers' own ``from_pretrained`` builds. Written back in the layout of
its checkpoint, it must be that checkpoint again. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.small_models import NotBuiltError, class_named, classes, default_config, small_config, summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

    from weightloaders import LoadPlan

# ------------------------------------------------------------------ one class


@dataclass
class Result:
    """What came of a class.

    Attributes:
        name: The class.
        status: ``"equal"``, ``"different"``, ``"theirs"`` (different, since transformers itself does not load what it
            saved, and weightloaders does), ``"not built"`` or ``"died"``.
        reason: Why it is not equal.
        parameters: How many numbers the small model has.
        tensors: How many tensors its checkpoint has.
        computed: Why some of the plan's steps compute -> how many do.
        seconds: How long it took.
    """

    name: str
    status: str
    reason: str = ""
    parameters: int = 0
    tensors: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


# How the weights are stored, and what is asked for.
WAYS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "auto"))


def check(name: str, *, whole: bool = False) -> Result:
    """Build, save, plan, load twice, compare; or plan the default model, unshrunk.

    Args:
        name: The class.
        whole: Whether it is the default model that is to be planned, from headers alone.
    """
    start = time.perf_counter()
    result = Result(name, "equal")
    try:
        (_plan_whole if whole else _check)(name, result)
    except NotBuiltError as error:
        result.status, result.reason = "not built", str(error)
    except Exception as error:  # noqa: BLE001 -- it is what the report is about
        result.status, result.reason = "different", summary(error)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _check(name: str, result: Result) -> None:
    import torch
    from transformers import AutoConfig

    from weightloaders import from_pretrained, open_weights, plan_load

    model_class = class_named(name)
    config = small_config(name)
    torch.manual_seed(0)
    model = model_class(config)
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    randomise(model)
    for stored, wanted in WAYS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            model.to(getattr(torch, stored)).save_pretrained(folder)
            # A class may serve models of several types; its own config is that of one of them.
            theirs = model_class.from_pretrained(folder, config=AutoConfig.from_pretrained(folder), dtype=wanted)
            ours, report = from_pretrained(folder, auto_class=model_class, dtype=wanted, progress=False)
            differences = [*_unfitting(report), *different(ours, theirs), *_trained_otherwise(ours, model)]
            if differences:
                result.status = (
                    "different" if any(_changed(ours, model)) or not any(_changed(theirs, model)) else "theirs"
                )
                result.reason = f"{stored} to {wanted}: {'; '.join(differences[:3])}"
                return
            if wanted in (stored, "auto") and (lost := list(_not_written_back(ours, folder))):
                result.status, result.reason = "different", f"not written back: {'; '.join(lost[:3])}"
                return
            with open_weights(folder) as weights:
                result.tensors, result.computed = len(weights), _computed_steps(plan_load(ours, weights))


def _not_written_back(model: nn.Module, folder: Path) -> Iterator[str]:
    """What is not as it was once a model was written in the layout of its checkpoint."""
    from weightloaders import open_weights, save_weights

    # A model may keep some parameters in float32 whatever they are stored in.
    save_weights(model, folder / "back", layout="checkpoint", dtype="stored")
    with open_weights(folder, "local") as before, open_weights(folder / "back", "local") as after:
        for name in sorted(before.keys() ^ after.keys()):
            yield f"{name} is only {'in the checkpoint' if name in before else 'in what was written'}"
        for name in before.keys() & after.keys():
            one, other = before[name], after[name]
            if (one.dtype, one.shape) != (other.dtype, other.shape) or not _same_bits(one, other):
                yield f"{name} has other values"


def _unfitting(found: Any) -> Iterator[str]:
    """What a plan or a report says is missing, unexpected or mismatched."""
    for what in ("missing", "unexpected", "mismatched"):
        names = getattr(found, what)
        if names:
            yield f"{what}: {', '.join(names[:3])} ({len(names)})"


def randomise(model: nn.Module) -> None:
    """Values of their own for all floating-point parameters and stored buffers."""
    import torch

    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))


def _changed(model: nn.Module, saved: nn.Module) -> Iterator[str]:
    """Names under which a model has other values than the one that was saved."""
    import torch

    values = saved.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, values[name].to(tensor.dtype)):
            yield name


def _computed_steps(plan: LoadPlan) -> dict[str, int]:
    from weightloaders.plan import ComputeStep

    return dict(Counter(step.reason for step in plan.steps if isinstance(step, ComputeStep)))


# ------------------------------------------------------------------ the default models, from headers alone


def _plan_whole(name: str, result: Result) -> None:
    import torch

    from weightloaders import plan_load
    from weightloaders.skeleton import build_skeleton

    config, model_class = default_config(name), class_named(name)
    try:
        model = build_skeleton(None, config=config, auto_class=model_class, dtype=torch.bfloat16).model
    except Exception as error:
        raise NotBuiltError(summary(error)) from error
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as place:
        result.tensors = _write_header(Path(place) / "model.safetensors", model)
        plan = plan_load(model, place)
    result.computed = _computed_steps(plan)
    if problems := list(_unfitting(plan)):
        result.status, result.reason = "different", "; ".join(problems)


def _write_header(file: Path, model: Any) -> int:
    """A checkpoint as transformers would save it of a model on meta, without its values; returns how many tensors."""
    from safetensors.torch import _TYPES  # the names that the format has for torch's dtypes
    from transformers.core_model_loading import revert_weight_conversion

    dtypes = {dtype: name for name, dtype in _TYPES.items()}
    tied = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    header, end = {}, 0
    for name, tensor in revert_weight_conversion(model, state).items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return len(header)


# ------------------------------------------------------------------ comparing


def different(model: Any, expected: Any) -> Iterator[str]:
    """In what a model differs from another: parameters and buffers, to the bit, their order, ties, the config."""
    if type(model) is not type(expected):
        yield f"it is a {type(model).__name__}"
    for what in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(m, what)(remove_duplicate=False)) for m in (model, expected))
        if list(ours) != list(theirs):
            yield f"{what} differ: {sorted(ours.keys() ^ theirs.keys())[:3] or 'in order'}"
        for name in ours.keys() & theirs.keys():
            one, other = ours[name], theirs[name]
            if _described(one) != _described(other):
                yield f"{name} is {_described(one)}, not {_described(other)}"
            elif not _same_bits(one, other):
                yield f"{name} has other values"
    if list(model.state_dict()) != list(expected.state_dict()):
        yield "the state dict has other names"
    if _ties(model) != _ties(expected):
        yield f"other ties: {[sorted(tie) for tie in _ties(model) ^ _ties(expected)][:2]}"
    if model.training != expected.training:
        yield "it is in training"
    ours, theirs = (m.config.to_dict() | {"_name_or_path": ""} for m in (model, expected))
    if ours != theirs:
        yield f"config: {[key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)][:3]}"


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), type(tensor), str(tensor.device)


def _trained_otherwise(model: nn.Module, built: nn.Module) -> Iterator[str]:
    """Parameters that are to be trained, or not, other than their module says.

    transformers' own ``from_pretrained`` forgets this: it makes every parameter one that is trained.
    """
    for (name, one), (_, other) in zip(model.named_parameters(), built.named_parameters(), strict=True):
        if one.requires_grad != other.requires_grad:
            yield f"{name}.requires_grad is {one.requires_grad}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    ours, theirs = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(ours, theirs)


def _ties(model: nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            groups.setdefault(parameter.data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


# ------------------------------------------------------------------ all classes, in processes of their own

ROOT = Path(__file__).resolve().parent.parent
BATCH, PATIENCE = 40, 120.0


def sweep(names: Sequence[str], workers: int = 2, *, whole: bool = False) -> Iterator[Result]:
    """The results of classes, in order, as they come. Each batch has a process of its own: a crash costs one class.

    Args:
        names: The classes.
        workers: How many processes run side by side.
        whole: See `check`.
    """
    batches = [list(names[at : at + BATCH]) for at in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(workers) as pool:
        for results in pool.map(functools.partial(_batch, whole=whole), batches):
            yield from results


def _batch(names: list[str], *, whole: bool) -> list[Result]:
    results: list[Result] = []
    while len(results) < len(names):
        rest = names[len(results) :]
        command = [
            sys.executable,
            "-m",
            "benchmarks.families",
            "--here",
            "--json",
            *(["--whole"] if whole else []),
            *rest,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        reason = "it ended the process"
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            try:
                done = subprocess.run(
                    command,
                    stdout=out,
                    stderr=errors,
                    env=environment,
                    cwd=ROOT,
                    timeout=PATIENCE * len(rest),
                    check=False,
                )
                reason += f" ({done.returncode})"
            except subprocess.TimeoutExpired:
                reason = "it took too long"
            out.seek(0)
            results += [Result(**json.loads(line)) for line in out if line.startswith("{")]
            errors.seek(0)
            said = errors.read().strip().splitlines()[-1:]
        if len(results) < len(names):
            results.append(Result(names[len(results)], "died", "; ".join([reason, *said])))
    return results


def report(results: Sequence[Result]) -> str:
    """The results as text."""
    by_status: dict[str, list[Result]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result)
    built = [r for r in results if r.status != "not built"]
    lines = [
        f"{len(results)} classes with their types: {len(built)} build, {len(by_status.get('equal', []))} are fine",
        f"{sum(r.parameters for r in results):,} parameters from {sum(r.tensors for r in results):,} tensors",
    ]
    titles = {"theirs": "transformers loads other values than it saved, weightloaders those"}
    for status in ("different", "died", "theirs", "not built"):
        if status in by_status:
            lines += ["", f"{titles.get(status, status)} ({len(by_status[status])}):"]
            lines += [f"  {r.name}: {r.reason}" for r in by_status[status]]
    computed = [r for r in results if r.computed]
    if computed:
        lines += ["", f"fine, with computed steps ({len(computed)}):"]
        lines += [f"  {r.name}: {', '.join(f'{n} {why}' for why, n in r.computed.items())}" for r in computed]
    return "\n".join(lines)


def _here(names: Sequence[str], *, whole: bool) -> Iterator[Result]:
    for name in names:
        with contextlib.redirect_stdout(sys.stderr):
            result = check(name, whole=whole)
        gc.collect()
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="CLASS", help="only these")
    parser.add_argument("--json", action="store_true", help="a JSON object a line for each class")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument(
        "--whole", action="store_true", help="only plan the default models as they are, from headers: nothing is loaded"
    )
    options = parser.parse_args()
    names = options.names or list(classes())
    unknown = [name for name in names if name not in classes()]
    if unknown:
        parser.error(f"no such classes: {', '.join(unknown)}")
    found = _here(names, whole=options.whole) if options.here else sweep(names, options.workers, whole=options.whole)
    results = []
    for result in found:
        results.append(result)
        if options.json:
            print(json.dumps(asdict(result)), flush=True)
    if not options.json:
        print(report(results))


if __name__ == "__main__":
    main()
