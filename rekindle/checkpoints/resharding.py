"""Pieces of tensors from other pieces: which bytes overlap, and how to read only these.

A piece is a box of the whole tensor; in its file it lies row by row, without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rekindle.checkpoints.block_checksums import granule
from rekindle.checkpoints.format import Header, header_bytes, read_header
from rekindle.checkpoints.manifest import FileEntry
from rekindle.checkpoints.store import Checkpoint

WINDOW_BYTES: Final = 64 << 20  # read at a time: enough for a store to fetch parts of in parallel

Range = tuple[int, int]  # first byte, end


class Excerpts:
    """A file of which a window is in memory: whole blocks, each read once if the order allows."""

    def __init__(self, checkpoint: Checkpoint, entry: FileEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self._buffer = bytearray()
        self._begin = self._end = 0

    def header(self) -> Header:
        """What the file says of itself.

        Raises CorruptError: it is not what was written, or no safetensors file; CheckpointError: it
        cannot be read.
        """
        size = self._entry.bytes
        beginning = self._hold(0, min(8, size))
        length = header_bytes(beginning)
        return read_header(self._hold(0, length) if 0 < length <= size else beginning, size)

    def read(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        """Yield the bytes of each range, which are there until the next one is asked for.

        ranges: in the order of their begins. Raises CorruptError, CheckpointError as header() does.
        """
        for window in windows(ranges, self._entry):
            self._hold(window[0][0], max(end for _, end in window))
            for begin, end in window:
                yield self._hold(begin, end)

    def fill(self, begin: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `begin` on: whole blocks straight, ends by the window.

        Raises CorruptError (what is in `into` is then of no use), CheckpointError as header() does.
        """
        end, step = begin + len(into), granule(self._entry)
        first = min(begin + -begin % step, end)
        last = end if end == self._entry.bytes else max(first, end - end % step)
        into[: first - begin] = self._hold(begin, first)
        if first < last:
            self._checkpoint.read_into(self._entry.name, first, into[first - begin : last - begin])
        into[last - begin :] = self._hold(last, end)

    def _hold(self, begin: int, end: int) -> memoryview:
        """Have these bytes in memory; what is there of their blocks already is not read again."""
        if begin == end:
            return memoryview(b"")
        first, last = _blocks(self._entry, begin, end)
        if first < self._begin or last > self._end:
            kept = max(0, self._end - first) if first >= self._begin else 0
            old, size = memoryview(self._buffer)[first - self._begin :][:kept], last - first
            if len(self._buffer) < size:
                self._buffer = bytearray(size)
            memory = memoryview(self._buffer)
            memory[:kept] = old
            self._begin = self._end = first  # nothing counts that was not verified
            self._checkpoint.read_into(self._entry.name, first + kept, memory[kept:size])
            self._end = last
        return memoryview(self._buffer)[begin - self._begin : end - self._begin]


def windows(ranges: Iterable[Range], entry: FileEntry) -> Iterator[list[Range]]:
    """Group ranges whose blocks follow each other: WINDOW_BYTES of blocks at most, or one range."""
    window: list[Range] = []
    begin = end = 0
    for each in ranges:
        first, last = _blocks(entry, *each)
        if window and (first > end or last - begin > WINDOW_BYTES):
            yield window
            window = []
        if not window:
            begin, end = first, last
        window.append(each)
        end = max(end, last)
    if window:
        yield window


def _blocks(entry: FileEntry, begin: int, end: int) -> Range:
    """The first byte and the end of the blocks in which these bytes are."""
    if begin == end:
        return begin, end
    step = granule(entry)
    return begin - begin % step, min(end + -end % step, entry.bytes)


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
