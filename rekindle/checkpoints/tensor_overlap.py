"""Which bytes of which piece of a tensor make another piece of it. Pure.

A piece is a box of the whole tensor; in its file it lies row by row, without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The elements of a tensor from `begin` to `end` in each dimension."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.begin, self.end, strict=True))

    @property
    def size(self) -> int:
        """Elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)


class Take(NamedTuple):
    """Bytes of a piece, begin to end, as an array of `shape`; its part `source` goes to `target`.

    target: in the array of the piece that is being made.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice | int, ...]


def box_at(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of this shape that begins there."""
    return Box(tuple(offset), tuple(a + n for a, n in zip(offset, shape, strict=True)))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return box_at([0] * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common, if that is anything."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return Box(begin, end) if all(a < b for a, b in zip(begin, end, strict=True)) else None


def without(box: Box, hole: Box) -> list[Box]:
    """What is left of the box; the hole lies in it."""
    left = []
    for dim, (low, high) in enumerate(zip(hole.begin, hole.end, strict=True)):
        before, behind = (*box.end[:dim], low), (*box.begin[:dim], high)
        parts = [
            Box(box.begin, (*before, *box.end[dim + 1 :])),
            Box((*behind, *box.begin[dim + 1 :]), box.end),
        ]
        left += [part for part in parts if part.size]
        box = Box(
            (*box.begin[:dim], low, *box.begin[dim + 1 :]),
            (*box.end[:dim], high, *box.end[dim + 1 :]),
        )
    return left


def takes(piece: Box, common: Box, wanted: Box, *, element: int, most: int) -> Iterator[Take]:
    """How `common`, which lies in both, gets from a piece that is there to the one that is wanted.

    What is cut along its rows is taken without a byte too much; of what is cut along another
    dimension, whole rows are. element: bytes of one. most: bytes of one take, as far as rows allow.
    """
    shape, size = piece.shape, common.shape
    low = [a - b for a, b in zip(common.begin, piece.begin, strict=True)]
    to = [a - b for a, b in zip(common.begin, wanted.begin, strict=True)]
    if not shape:
        yield Take(0, element, (), (), ())
        return
    # The rows are those of the first dimension that has several: one row would be taken whole.
    dim = next((d for d, n in enumerate(size[:-1]) if n > 1), len(size) - 1)
    begin = sum(low[d] * math.prod(shape[d + 1 :]) * element for d in range(dim))
    row = math.prod(shape[dim + 1 :]) * element
    inner = range(dim + 1, len(shape))
    source = [slice(low[d], low[d] + size[d]) for d in inner]
    target = [slice(to[d], to[d] + size[d]) for d in inner]
    at_once = max(1, most // row)
    for first in range(0, size[dim], at_once):
        rows = min(at_once, size[dim] - first)
        start = begin + (low[dim] + first) * row
        yield Take(
            start,
            start + rows * row,
            (rows, *shape[dim + 1 :]),
            (slice(0, rows), *source),
            (*to[:dim], slice(to[dim] + first, to[dim] + first + rows), *target),
        )


def nearest(to: int, count: int) -> list[int]:
    """The numbers 0 to count-1, those nearest to `to` first."""
    return sorted(range(count), key=lambda number: abs(number - to))
