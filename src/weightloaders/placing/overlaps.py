"""Parameters that share memory without being one and the same: views of a larger one, transposed ties."""

from __future__ import annotations

import bisect
import operator
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from weightloaders.placing.comparing import same_bits, values_of
from weightloaders.targets import Span, Target, memory_span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightloaders.weights.info import TensorInfo


def _spans(targets: Iterable[Target]) -> list[tuple[Span, Target]]:
    """The memory of each, by device and then by start and end."""
    by_device: dict[str, list[tuple[int, Span, Target]]] = defaultdict(list)
    for target in targets:
        span = memory_span(target.tensor)
        if span is not None:
            # One number is compared in a fraction of the time that two take.
            by_device[span.device].append((span.start << 64 | span.end, span, target))
    ordered = [sorted(spans, key=operator.itemgetter(0)) for _, spans in sorted(by_device.items())]
    return [(span, target) for spans in ordered for _, span, target in spans]


def covered(targets: Iterable[Target], fillers: Iterable[Target]) -> dict[str, str]:
    """Which targets get their values with the memory of others, and with whose.

    Args:
        targets: Those in question.
        fillers: Those that are filled.
    """
    targets, fillers = list(targets), list(fillers)
    if not targets or not fillers:
        return {}
    # Neighbours make up one piece of memory; a sparse one leaves gaps, so nothing can be said of what lies in it.
    pieces: list[tuple[str, int, int, str]] = []
    for span, filler in _spans(fillers):
        if not span.dense:
            continue
        if pieces and pieces[-1][0] == span.device and span.start <= pieces[-1][2]:
            device, start, end, name = pieces[-1]
            pieces[-1] = (device, start, max(end, span.end), name)
        else:
            pieces.append((span.device, span.start, span.end, filler.name))
    result = {}
    for span, target in _spans(targets):
        at = bisect.bisect_right(pieces, (span.device, span.start, float("inf"), "")) - 1
        if at >= 0 and pieces[at][0] == span.device and span.end <= pieces[at][2]:
            result[target.name] = pieces[at][3]
    return result


def overlapping(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Sets of targets of which each shares memory with another of the set."""
    cluster: list[Target] = []
    device, end = "", 0
    for span, target in _spans(targets):
        if span.device != device or span.start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster, device, end = [], span.device, span.end
        cluster.append(target)
        end = max(end, span.end)
    if len(cluster) > 1:
        yield cluster


def contradiction(cluster: Sequence[tuple[Target, TensorInfo]]) -> tuple[Target, TensorInfo] | None:
    """The first of some targets with common memory that would not have its source's values after all were filled.

    Reads all of the sources.
    """
    spans = [span for target, _ in cluster if (span := memory_span(target.tensor)) is not None]
    first = min(span.start for span in spans)
    memory = torch.zeros(max(span.end for span in spans) - first, dtype=torch.uint8, device="cpu")
    views = []
    for (target, info), span in zip(cluster, spans, strict=True):
        start, dtype = span.start - first, target.tensor.dtype
        typed = memory[start : span.end - first].view(dtype)
        views.append((target, info, typed.as_strided(target.shape, target.tensor.stride())))
    for _, info, view in views:
        view.copy_(values_of(info))
    return next(
        ((target, info) for target, info, view in views if not same_bits(view, values_of(info).to(view.dtype))), None
    )
