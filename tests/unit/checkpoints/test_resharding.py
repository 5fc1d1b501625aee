"""The bytes of existing pieces that make a wanted piece, compared with the slices of numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.resharding import Box, box_at, nearest, overlap, takes, whole, without

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    """Return the part of an array in a box."""
    return array[(..., *itertools.starmap(slice, zip(*box, strict=True)))]


def chunks(shape: tuple[int, ...], dim: int, ranks: int) -> list[Box]:
    """Return the pieces of a tensor that torch cuts along a dimension.

    The last ones are smaller.
    """
    rows = -(-shape[dim] // ranks)
    found = []
    for rank in range(ranks):
        begin, end = (min(rows * n, shape[dim]) for n in (rank, rank + 1))
        offset, size = [0] * len(shape), [*shape]
        offset[dim], size[dim] = begin, end - begin
        found.append(box_at(offset, size))
    return found


def assemble(
    array: np.ndarray, pieces: list[Box], wanted: Box, most: int
) -> tuple[np.ndarray, int]:
    """Return the wanted piece from the bytes of the others, and the number of bytes read."""
    target = np.full(wanted.shape, -1, array.dtype)
    left, read = [wanted] if wanted.size else [], 0
    for piece in pieces:
        file = cut(array, piece).tobytes()
        rest = []
        for box in left:
            common = overlap(box, piece)
            rest += without(box, common) if common else [box]
            if common is None:
                continue
            for take in takes(piece, common, wanted, element=array.itemsize, most=most):
                data = file[take.begin : take.end]
                assert len(data) == math.prod(take.shape) * array.itemsize  # no other bytes
                rows = np.frombuffer(data, array.dtype).reshape(take.shape)
                target[take.target] = rows[take.source]
                read += len(data)
        left = rest
    assert not left
    return target, read


@given(st.data(), shapes, st.integers(1, 200))
def test_any_box_of_any_pieces(data: st.DataObject, shape: tuple[int, ...], most: int) -> None:
    """Any pieces make any box; the pieces may overlap or be empty, in any order."""
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    pieces = [*data.draw(st.lists(boxes(shape), max_size=5)), whole(shape)]
    wanted = data.draw(boxes(shape))
    found, _ = assemble(array, pieces, wanted, most)
    assert np.array_equal(found, cut(array, wanted))


@given(st.data(), shapes.filter(len), st.integers(1, 9), st.integers(1, 9), st.integers(1, 200))
def test_cut_anew(
    data: st.DataObject, shape: tuple[int, ...], before: int, after: int, most: int
) -> None:
    """Any number of ranks can read pieces that any number of ranks wrote, along any dimensions.

    If both cuts are along the first dimension, no unnecessary byte is read.
    """
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    dims = st.integers(0, len(shape) - 1)
    was, will = data.draw(dims), data.draw(dims)
    for wanted in chunks(shape, will, after):
        found, read = assemble(array, chunks(shape, was, before), wanted, most)
        assert np.array_equal(found, cut(array, wanted))
        if was == will == 0:
            assert read == found.nbytes


@given(st.data(), shapes)
def test_a_box_without_a_part(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """without() returns every element outside of the hole exactly once."""
    box = data.draw(boxes(shape))
    common = overlap(box, data.draw(boxes(shape)))
    if common is None:
        return
    count = np.zeros(shape, int)
    for part in [common, *without(box, common)]:
        assert part.size
        cut(count, part)[...] += 1
    wanted = np.zeros(shape, int)
    cut(wanted, box)[...] = 1
    assert np.array_equal(count, wanted)


def test_a_number_without_dimensions() -> None:
    """A scalar is a box of one element."""
    [take] = takes(whole(()), whole(()), whole(()), element=4, most=1)
    assert (take.begin, take.end, take.shape, take.source, take.target) == (0, 4, (), (), ())


def test_files_near_to_ones_own_come_first() -> None:
    """nearest() returns all files, ordered by their distance from this rank's file."""
    assert nearest(3, 6) == [3, 2, 4, 1, 5, 0]
    assert nearest(0, 1) == [0]
