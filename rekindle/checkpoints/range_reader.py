"""Parts of a checkpoint's file, read without the rest of it, in bounded memory, and verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

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


def windows(
    ranges: Iterable[Range], entry: FileEntry, most: int = WINDOW_BYTES
) -> Iterator[list[Range]]:
    """Group ranges whose blocks follow each other, up to `most` bytes of blocks or one range."""
    window: list[Range] = []
    begin = end = 0
    for each in ranges:
        first, last = _blocks(entry, *each)
        if window and (first > end or last - begin > most):
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
