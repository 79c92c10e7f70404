"""Boxes that a tensor is made of: whatever they are, exactly those that fill it once are taken."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightloaders.errors import CheckpointFormatError
from weightloaders.weights import boxes
from weightloaders.weights.boxes import Box, check_cover

SIDE = 4


def side() -> st.SearchStrategy[tuple[int, int]]:
    """Where a box begins along a dimension, and its size."""
    return st.integers(0, SIDE - 1).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(0, SIDE - begin)))


def box() -> st.SearchStrategy[Box]:
    return st.tuples(side(), side()).map(lambda sides: Box(*zip(*sides, strict=True), "file"))


@st.composite
def cut_up(draw: st.DrawFn) -> list[Box]:
    """A square, cut in two again and again, which may have one box replaced."""
    found = [Box((0, 0), (SIDE, SIDE), "file")]
    for _ in range(draw(st.integers(0, 6))):
        whole, dim = found.pop(draw(st.integers(0, len(found) - 1))), draw(st.integers(0, 1))
        cut = draw(st.integers(0, whole.shape[dim]))
        ends = {0: ((cut, whole.shape[1]), (whole.shape[0] - cut, whole.shape[1])),
                1: ((whole.shape[0], cut), (whole.shape[0], whole.shape[1] - cut))}[dim]  # fmt: skip
        at = tuple(begin + (cut if d == dim else 0) for d, begin in enumerate(whole.at))
        found += [Box(whole.at, ends[0], "file"), Box(at, ends[1], "file")]
    if draw(st.booleans()):
        found[draw(st.integers(0, len(found) - 1))] = draw(box())
    return found


@given(cut_up() | st.lists(box(), max_size=5))
def test_just_those_boxes_are_taken_that_fill_each_element_once(found: list[Box]) -> None:
    filled = torch.zeros(SIDE, SIDE, dtype=torch.int64)
    for (y, x), (height, width), _ in found:
        filled[y : y + height, x : x + width] += 1
    if bool((filled == 1).all()):
        check_cover("w", (SIDE, SIDE), found)
    else:
        with pytest.raises(CheckpointFormatError, match="'w'"):
            check_cover("w", (SIDE, SIDE), found)


def test_the_two_halves_of_many_dimensions_need_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    neighbours = boxes._neighbours
    monkeypatch.setattr(boxes, "_neighbours", lambda group: compared.append(len(group)) or neighbours(group))
    dims = 10
    check_cover("w", (2,) * dims, [Box(at, (1,) * dims, "file") for at in itertools.product((0, 1), repeat=dims)])
    assert max(compared, default=0) <= 1


def test_a_scalar_is_filled_once() -> None:
    check_cover("w", (), [Box((), (), "file")])
    with pytest.raises(CheckpointFormatError, match="the same elements"):
        check_cover("w", (), [Box((), (), "file")] * 2)
