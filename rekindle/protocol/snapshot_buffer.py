"""Snapshots: a rank's state in memory that its agent owns, with checksums.

A buffer is a memory file: one block of control words, then the bytes of a safetensors file. So
the snapshot *is* the checkpoint file. The rank writes one buffer while the other keeps the last
good state. The locks are open file description locks. The kernel frees them when their holder
ends, so a rank killed during a write leaves an invalid buffer, never a locked one.
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

from rekindle.checkpoints.format import BlockDigests
from rekindle.errors import CorruptError
from rekindle.states import StateId

BLOCK_BYTES = 4 << 20  # still in the cache after the copy; smaller blocks switch threads too often
CONTROL_BYTES = 4096
BUFFERS = 2  # one is written while the other is kept
# Two buffers of a shard are kept while a third is written. The newest snapshots of two ranks may
# differ by one, and then only the older one exists on all ranks.
BUFFERS_OF_SHARD = 3

_MAPPED_AT_ONCE = 1 << 28

# Control words: valid flag, step, generation and bytes of the file; then 64 bytes of checksum text,
# and the settled flag.
_WORDS = struct.Struct("<qqqq")
_CHECKSUM_AT = _WORDS.size
_CHECKSUM_BYTES = 64
_RELEASED_AT = _CHECKSUM_AT + _CHECKSUM_BYTES
# struct flock for F_OFD_SETLK: its type, `whence`, start, length, and pid (must be 0).
_FLOCK = struct.Struct("hhqqi4x")


def blocks_of(size: int) -> int:
    """Return the number of blocks in `size` bytes; the last block may be shorter."""
    return -(-size // BLOCK_BYTES)


def block_of(content: memoryview, number: int) -> memoryview:
    """Return the bytes of one block of the content."""
    return content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def digest(block: memoryview) -> bytes:
    """Return the checksum of one block."""
    return xxhash.xxh3_128_digest(block)


def seal_of(digests: Iterable[bytes]) -> str:
    """Return the seal: the checksum of the checksums of all blocks in their order."""
    return f"xxh3_128 of blocks:{xxhash.xxh3_128_hexdigest(b''.join(digests))}"


def seal(content: memoryview) -> str:
    """Return the seal of a whole content."""
    return seal_of(digest(block_of(content, n)) for n in range(blocks_of(len(content))))


def arriving() -> BlockDigests:
    """Return what computes the digests of a content that arrives in pieces, for `seal_of`."""
    return BlockDigests(BLOCK_BYTES, xxhash.xxh3_128)


class _Mappings:
    """The memory files that this process has mapped, each once even if it opens them several times.

    A second mapping of a file takes as long as a copy, because the kernel must find its pages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[mmap.mmap, int]] = {}  # with the number of users

    def take(self, fd: int) -> mmap.mmap:
        """Return the mapping of this file, and count one user more."""
        with self._lock:
            found = self._known.get(_identity(fd))
            mapped, count = found or (_map(fd), 0)
            self._known[_identity(fd)] = (mapped, count + 1)
        return mapped

    def give_back(self, fd: int) -> None:
        """Count one user less, and end the mapping after the last one.

        A raised error may still hold a view of the mapping; the mapping then ends with that view.
        """
        with self._lock:
            mapped, count = self._known.pop(_identity(fd))
            if count > 1:
                self._known[_identity(fd)] = (mapped, count - 1)
            else:
                with contextlib.suppress(BufferError):
                    mapped.close()


def _map(fd: int) -> mmap.mmap:
    # The mapping keeps its descriptor, so it gets its own, without the locks of the first user.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, 0)
    finally:
        os.close(own)


def _identity(fd: int) -> tuple[int, int]:
    """Return a key that no other file has while this one is open or mapped."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


_mappings = _Mappings()


class SnapshotBuffer:
    """One of a rank's buffers, for both sides."""

    def __init__(self, fd: int) -> None:
        # A separate open file description, so that its locks exclude the other side's.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._map = _mappings.take(self._fd)
        self.data = memoryview(self._map)[CONTROL_BYTES:]

    def map_pages(self) -> None:
        """Map all its pages here; the first write would take six times as long to map them.

        When a process reads a page, the kernel also maps the neighbours; for a write it does not.
        """
        for begin in range(0, len(self.data), _MAPPED_AT_ONCE):  # other threads run between
            bytes(self.data[begin : begin + _MAPPED_AT_ONCE : mmap.PAGESIZE])

    def close(self) -> None:
        """Unmap the buffer; the other side keeps its bytes. A second call does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            with contextlib.suppress(BufferError):  # as in give_back()
                self.data.release()
            _mappings.give_back(fd)
        finally:
            os.close(fd)  # this also frees the locks

    def lock(self, *, write: bool, wait: bool = False) -> bool:
        """Lock the buffer; False: the other side holds a lock."""
        kind = fcntl.F_WRLCK if write else fcntl.F_RDLCK
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        """Unlock the buffer."""
        unlock = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, unlock)

    def begin(self) -> None:
        """Declare the content invalid before it is written."""
        _WORDS.pack_into(self._map, 0, 0, 0, 0, 0)
        self._map[_CHECKSUM_AT : _RELEASED_AT + 1] = bytes(_CHECKSUM_BYTES + 1)

    def commit(self, state: StateId, file_bytes: int, checksum: str = "") -> None:
        """Declare that the content is this state.

        checksum: the seal, if it is known; empty: the content is not sealed yet.
        """
        _WORDS.pack_into(self._map, 0, 0, *state, file_bytes)
        self._map[_CHECKSUM_AT:_RELEASED_AT] = checksum.encode().ljust(_CHECKSUM_BYTES, b"\0")
        _WORDS.pack_into(self._map, 0, 1, *state, file_bytes)

    @property
    def state(self) -> StateId | None:
        """The state in the buffer; None: the content is invalid."""
        valid, step, generation, _ = _WORDS.unpack_from(self._map, 0)
        return StateId(step, generation) if valid == 1 else None

    @property
    def recency(self) -> StateId:
        """The key for sorting: buffers without a valid state come first."""
        return self.state or StateId(-1, 0)

    @property
    def file(self) -> memoryview:
        """The bytes of the safetensors file."""
        return self.data[: _WORDS.unpack_from(self._map, 0)[3]]

    @property
    def is_sealed(self) -> bool:
        """Whether the content is valid and its checksum is known."""
        return self.state is not None and self._map[_CHECKSUM_AT] != 0

    def seal(self) -> None:
        """Compute the content's checksum and store it beside the content. The agent calls this."""
        sealed = seal(self.file).encode()
        self._map[_CHECKSUM_AT:_RELEASED_AT] = sealed.ljust(_CHECKSUM_BYTES, b"\0")

    @property
    def checksum(self) -> str:
        """The seal of the content; empty: it is not sealed."""
        return self._map[_CHECKSUM_AT:_RELEASED_AT].rstrip(b"\0").decode()

    def release_writer(self) -> None:
        """Declare that the agent has sealed the content and, if due, that its copy exists."""
        self._map[_RELEASED_AT] = 1

    @property
    def is_released(self) -> bool:
        """Whether the agent has sealed the content and, if due, its copy exists."""
        return self.state is not None and self._map[_RELEASED_AT] == 1

    def verify(self, digests: Sequence[bytes] | None = None) -> None:
        """Compare the content with its seal. Raises CorruptError: they differ.

        digests: the checksums of its blocks, if they are known.
        """
        sealed = self.checksum or "none"
        found = seal(self.file) if digests is None else seal_of(digests)
        if sealed != found:
            raise CorruptError(
                f"snapshot of step {self.recency.step}: checksum is {found}, sealed was {sealed}"
            )
