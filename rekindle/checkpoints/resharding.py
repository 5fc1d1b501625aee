"""Making pieces of tensors from other pieces: which bytes overlap, and how to read only them.

A piece is a box of a tensor. Its file holds the piece row by row, without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rekindle.checkpoints.block_checksums import granule
from rekindle.checkpoints.format import Header, header_bytes, read_header
from rekindle.checkpoints.manifest import FileEntry
from rekindle.checkpoints.store import Checkpoint

WINDOW_BYTES: Final = 64 << 20  # read together: enough for a store to fetch parts of it in parallel

Range = tuple[int, int]  # first byte, end


class Excerpts:
    """A file with a window in memory: complete blocks, each read once if the order allows."""

    def __init__(self, checkpoint: Checkpoint, entry: FileEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self._buffer = bytearray()
        self._begin = self._end = 0

    def header(self) -> Header:
        """Return the header of the file.

        Raises CorruptError: the bytes are not what was written, or not a safetensors file.
        CheckpointError: the file cannot be read.
        """
        size = self._entry.bytes
        beginning = self._hold(0, min(8, size))
        length = header_bytes(beginning)
        return read_header(self._hold(0, length) if 0 < length <= size else beginning, size)

    def read(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        """Yield the bytes of each range. They are valid until the next range is requested.

        ranges: sorted by their first byte. Raises CorruptError, CheckpointError as header() does.
        """
        for window in windows(ranges, self._entry):
            self._hold(window[0][0], max(end for _, end in window))
            for begin, end in window:
                yield self._hold(begin, end)

    def fill(self, begin: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes, starting at `begin`.

        The method reads complete blocks directly into `into`, and the two ends through the window.
        Raises CorruptError and CheckpointError as header() does. After CorruptError the bytes in
        `into` are invalid.
        """
        end, step = begin + len(into), granule(self._entry)
        first = min(begin + -begin % step, end)
        last = end if end == self._entry.bytes else max(first, end - end % step)
        into[: first - begin] = self._hold(begin, first)
        if first < last:
            self._checkpoint.read_into(self._entry.name, first, into[first - begin : last - begin])
        into[last - begin :] = self._hold(last, end)

    def _hold(self, begin: int, end: int) -> memoryview:
        """Return these bytes from the window. Read the blocks that are not in it."""
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
            self._begin = self._end = first  # without verified bytes until the read has succeeded
            self._checkpoint.read_into(self._entry.name, first + kept, memory[kept:size])
            self._end = last
        return memoryview(self._buffer)[begin - self._begin : end - self._begin]


def windows(ranges: Iterable[Range], entry: FileEntry) -> Iterator[list[Range]]:
    """Group ranges with consecutive blocks: at most WINDOW_BYTES of blocks, or one range."""
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
    """Return the first byte and the end of the blocks that hold these bytes."""
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
        """Return the number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)


class Take(NamedTuple):
    """Bytes of a piece, begin to end, as an array of `shape`. Copy its part `source` to `target`.

    target: slices of the array of the new piece.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice | int, ...]


def box_at(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box of this shape at this offset."""
    return Box(tuple(offset), tuple(a + n for a, n in zip(offset, shape, strict=True)))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of the complete tensor."""
    return box_at([0] * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes, or None if there is not any."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return Box(begin, end) if all(a < b for a, b in zip(begin, end, strict=True)) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return the rest of the box without the hole. The hole must lie in the box."""
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
    """Yield the reads that copy `common` from the existing `piece` to the `wanted` piece.

    `common` lies in both pieces. If it has complete rows of `piece`, the reads have only needed
    bytes. Otherwise the reads have complete rows, also with bytes that are not needed. element:
    bytes of an element. most: the most bytes of one read, but at least one row.
    """
    shape, size = piece.shape, common.shape
    low = [a - b for a, b in zip(common.begin, piece.begin, strict=True)]
    to = [a - b for a, b in zip(common.begin, wanted.begin, strict=True)]
    if not shape:
        yield Take(0, element, (), (), ())
        return
    # The rows are along the first dimension in which `common` has several elements. Along an
    # earlier dimension, one read would have the complete range.
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
    """Return the numbers 0 to count-1, sorted by their distance from `to`."""
    return sorted(range(count), key=lambda number: abs(number - to))
