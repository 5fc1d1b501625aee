"""Snapshots: a rank's state in memory that its agent owns, with checksums.

A buffer is a memory file: one block of control words, then the bytes of a safetensors file, so that
the snapshot *is* the checkpoint file. The rank writes one buffer while the other keeps the last
good state. Locks are the kernel's (open file description locks): they end with their holder, so a
rank killed in the middle of a write leaves an invalid buffer, never a locked one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Sequence

import xxhash

from rekindle.errors import CorruptError
from rekindle.recovery.policy.plan import Made

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


class BlockChecksum:
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


CONTROL_BYTES = 4096
BUFFERS = 2  # one is written while the other is kept
# Of a shard two are kept while one is written: ranks may be a snapshot apart, and the two newest
# have one that all have.
BUFFERS_OF_SHARD = 3

_MAPPED_AT_ONCE = 1 << 28

# Control words: valid flag, step, generation and bytes of the file; then 64 bytes of checksum text,
# and a flag.
_WORDS = struct.Struct("<qqqq")
_CHECKSUM_AT = _WORDS.size
_CHECKSUM_BYTES = 64
_SETTLED_AT = _CHECKSUM_AT + _CHECKSUM_BYTES
# struct flock as F_OFD_SETLK wants it: type, whence, start, length, pid (must be 0).
_FLOCK = struct.Struct("hhqqi4x")


class _Mappings:
    """The memory files that this process has mapped, each once however often it is opened.

    To map anew what was mapped before costs as much as to copy it: its pages have to be found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[mmap.mmap, int]] = {}  # with how many have it

    def take(self, fd: int) -> mmap.mmap:
        """The mapping of this file."""
        with self._lock:
            found = self._known.get(_identity(fd))
            mapped, count = found or (_map(fd), 0)
            self._known[_identity(fd)] = (mapped, count + 1)
        return mapped

    def give_back(self, fd: int) -> None:
        """End the mapping with the last who has it.

        An error that is under way may hold a view of it; then it ends with that view.
        """
        with self._lock:
            mapped, count = self._known.pop(_identity(fd))
            if count > 1:
                self._known[_identity(fd)] = (mapped, count - 1)
            else:
                with contextlib.suppress(BufferError):
                    mapped.close()


def _map(fd: int) -> mmap.mmap:
    # The mapping keeps its descriptor: one without the locks of whoever asked first.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, 0)
    finally:
        os.close(own)


def _identity(fd: int) -> tuple[int, int]:
    """What no other file has as long as this one is open or mapped."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


_mappings = _Mappings()


class SnapshotBuffer:
    """One of a rank's two buffers, seen from either side."""

    def __init__(self, fd: int) -> None:
        # A description of our own, for locks that exclude the other side's.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._map = _mappings.take(self._fd)
        self.data = memoryview(self._map)[CONTROL_BYTES:]

    def map_pages(self) -> None:
        """Have all its pages mapped here, which the first write would do at six times the cost.

        The kernel maps a page's neighbours with it when it is read, but not when it is written.
        """
        for begin in range(0, len(self.data), _MAPPED_AT_ONCE):  # other threads have their turns
            bytes(self.data[begin : begin + _MAPPED_AT_ONCE : mmap.PAGESIZE])

    def close(self) -> None:
        """Unmap the buffer; its bytes live on as long as the other side has it. Twice is once."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            with contextlib.suppress(BufferError):  # as in give_back()
                self.data.release()
            _mappings.give_back(fd)
        finally:
            os.close(fd)  # and with it the locks

    def lock(self, *, write: bool, wait: bool = False) -> bool:
        """Take the buffer; False: the other side has it."""
        kind = fcntl.F_WRLCK if write else fcntl.F_RDLCK
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        """Give the buffer back."""
        unlock = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, unlock)

    def begin(self) -> None:
        """Declare the content invalid before it is written."""
        _WORDS.pack_into(self._map, 0, 0, 0, 0, 0)
        self._map[_CHECKSUM_AT : _SETTLED_AT + 1] = bytes(_CHECKSUM_BYTES + 1)

    def commit(self, made: Made, file_bytes: int, checksum: str = "") -> None:
        """Declare the content to be this state.

        checksum: what it is sealed with, where that is known; empty: it is not sealed yet.
        """
        _WORDS.pack_into(self._map, 0, 0, *made, file_bytes)
        self._map[_CHECKSUM_AT:_SETTLED_AT] = checksum.encode().ljust(_CHECKSUM_BYTES, b"\0")
        _WORDS.pack_into(self._map, 0, 1, *made, file_bytes)

    @property
    def made(self) -> Made | None:
        """The state that is held; None: the content is not valid."""
        valid, step, generation, _ = _WORDS.unpack_from(self._map, 0)
        return (step, generation) if valid == 1 else None

    @property
    def recency(self) -> Made:
        """Its state, for sorting: buffers that hold none come first."""
        return self.made or (-1, 0)

    @property
    def file(self) -> memoryview:
        """The bytes of the safetensors file."""
        return self.data[: _WORDS.unpack_from(self._map, 0)[3]]

    @property
    def is_sealed(self) -> bool:
        """Whether the content is valid and its checksum is known."""
        return self.made is not None and self._map[_CHECKSUM_AT] != 0

    def seal(self) -> None:
        """Compute the content's checksum and keep it beside the content; the agent's work."""
        sealed = seal(self.file).encode()
        self._map[_CHECKSUM_AT:_SETTLED_AT] = sealed.ljust(_CHECKSUM_BYTES, b"\0")

    @property
    def checksum(self) -> str:
        """What the content was sealed with; empty: it was not."""
        return self._map[_CHECKSUM_AT:_SETTLED_AT].rstrip(b"\0").decode()

    def settle(self) -> None:
        """Declare that the agent has sealed the content and, where that is due, had it copied."""
        self._map[_SETTLED_AT] = 1

    @property
    def is_settled(self) -> bool:
        """Whether the agent has done with the content what protects it."""
        return self.made is not None and self._map[_SETTLED_AT] == 1

    def verify(self, digests: Sequence[bytes] | None = None) -> None:
        """Hold the content against its seal. Raises CorruptError: it is not what was sealed.

        digests: of its blocks, where they are known.
        """
        sealed = self.checksum or "none"
        found = seal(self.file) if digests is None else seal_of(digests)
        if sealed != found:
            raise CorruptError(
                f"snapshot of step {self.recency[0]}: checksum is {found}, sealed was {sealed}"
            )
