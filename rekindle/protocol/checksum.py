"""What a snapshot in memory is sealed with: a checksum over the checksums of its blocks.

Blocks, because whoever takes a snapshot over can then verify and copy it on several threads, each
block while it is in the processor's cache: memory is read once, not twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 4 << 20  # still in the cache when it is copied; smaller ones take turns too often


def blocks_of(size: int) -> int:
    """How many blocks so many bytes have; the last one may be shorter."""
    return -(-size // BLOCK_BYTES)


def block_of(content: memoryview, number: int) -> memoryview:
    """The bytes of one of its blocks."""
    return content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def digest(block: memoryview) -> bytes:
    """The checksum of one block."""
    return xxhash.xxh3_128_digest(block)


def seal_of(digests: Iterable[bytes]) -> str:
    """The seal, from the checksums of all blocks in their order."""
    return f"xxh3_128 of blocks:{xxhash.xxh3_128_hexdigest(b''.join(digests))}"


def seal(content: memoryview) -> str:
    """The seal of a whole content."""
    return seal_of(digest(block_of(content, n)) for n in range(blocks_of(len(content))))


class Sealer:
    """The seal of a content whose bytes arrive one after the other."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._left = BLOCK_BYTES

    def add(self, chunk: memoryview) -> None:
        """Add the bytes that follow; how they are cut changes nothing."""
        while chunk:
            begun, chunk = chunk[: self._left], chunk[self._left :]
            self._block.update(begun)
            self._left -= len(begun)
            if not self._left:
                self._digests.append(self._block.digest())
                self._block.reset()
                self._left = BLOCK_BYTES

    def __str__(self) -> str:
        begun = [self._block.digest()] if self._left < BLOCK_BYTES else []
        return seal_of(self._digests + begun)
