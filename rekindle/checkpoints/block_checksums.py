"""Checksums of a file and of each of its blocks, so that a reader can verify any part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash

from rekindle.checkpoints.format import BlockDigests, Bytes, checksum, checksum_of
from rekindle.checkpoints.manifest import FileEntry
from rekindle.errors import CheckpointError, CorruptError

# Bytes. A reader must read a complete block for one tensor, so a block is small. A block is also
# large enough that the manifest of a terabyte lists all blocks in 2.5 MB.
BLOCK: Final = 8 << 20

# Bytes. Both checksums read each piece, and the second one reads it from the processor's cache.
_PIECE: Final = 1 << 18

# Fills the complete view with the file's bytes, starting at this offset.
Fetch = Callable[[int, memoryview], None]


class Sums(msgspec.Struct, frozen=True):
    """Size and checksums of a file's bytes, for a `FileEntry`."""

    bytes: int
    checksum: str
    blocks: tuple[str, ...]

    def entry(self, name: str, ranks: tuple[int, ...], stored: str = "") -> FileEntry:
        """Return the entry of a file that holds these bytes."""
        return FileEntry(
            name=name,
            bytes=self.bytes,
            checksum=self.checksum,
            ranks=ranks,
            stored=stored,
            block_bytes=BLOCK,
            blocks=self.blocks,
        )


class Span(msgspec.Struct, frozen=True):
    """Block number `index` of a file: its bytes from begin to end."""

    index: int
    begin: int
    end: int


class BlockSums(BlockDigests):
    """Computes the checksums of a sequence of bytes: of the whole, and of each block."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes, xxhash.xxh3_64)
        self._whole = xxhash.xxh3_128()

    def add(self, chunk: Bytes) -> None:
        """Add the next bytes. The size of the chunks does not change the result."""
        view = memoryview(chunk).cast("B")
        for begin in range(0, len(view), _PIECE):
            piece = view[begin : begin + _PIECE]
            self._whole.update(piece)
            super().add(piece)

    def sums(self) -> Sums:
        """Return the checksums of all bytes. The last block may be shorter."""
        blocks = tuple(digest.hex() for digest in self.digests())
        return Sums(self.bytes, checksum_of(self._whole), blocks)


def summed(chunks: Iterable[Bytes]) -> Sums:
    """Return the checksums of these bytes."""
    found = BlockSums(BLOCK)
    for chunk in chunks:
        found.add(chunk)
    return found.sums()


def spans(entry: FileEntry, begin: int, end: int) -> list[Span]:
    """Return the blocks that hold these bytes. A file without known blocks is one block."""
    if begin >= end:
        return []
    size = granule(entry)
    indices = range(begin // size, -(-end // size))
    return [Span(i, i * size, min((i + 1) * size, entry.bytes)) for i in indices]


def granule(entry: FileEntry) -> int:
    """Return the bytes that are verified together: a block, or a file whose blocks are unknown."""
    return entry.block_bytes if entry.blocks else max(entry.bytes, 1)


def check_range(entry: FileEntry, begin: int, count: int) -> None:
    """Raise CheckpointError unless the file has these bytes."""
    if begin < 0 or begin + count > entry.bytes:
        raise CheckpointError(
            f"{entry.name} has {entry.bytes} bytes, so it does not have {count} bytes at byte "
            f"{begin}"
        )


def read_span(entry: FileEntry, span: Span, begin: int, view: memoryview, fetch: Fetch) -> None:
    """Fill the part of the view that this block covers.

    view: the file's bytes, starting at `begin`. If the view covers the complete block, the function
    reads directly into the view.
    Raises CorruptError: the block is not what was written. The function also raises the errors of
    fetch.
    """
    target = view[max(span.begin - begin, 0) : span.end - begin]
    if len(target) == span.end - span.begin:
        fetch(span.begin, target)
        _check(entry, span, target)
        return
    block = memoryview(bytearray(span.end - span.begin))
    fetch(span.begin, block)
    _check(entry, span, block)
    first = max(begin - span.begin, 0)
    target[:] = block[first : first + len(target)]


def _check(entry: FileEntry, span: Span, data: memoryview) -> None:
    """Raise CorruptError unless this block is what was written."""
    if entry.blocks:
        actual, written = xxhash.xxh3_64_hexdigest(data), entry.blocks[span.index]
    else:
        actual, written = checksum([data]), entry.checksum
    if actual != written:
        raise CorruptError(
            f"checksum of {entry.name} differs: its bytes {span.begin} to {span.end} have "
            f"{actual}, the manifest has {written}"
        )
