"""File operations of checkpoints: write through to the disk, verify, and lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rekindle.checkpoints.block_checksums import Sums, read_span, spans, summed
from rekindle.checkpoints.format import Bytes, checksum
from rekindle.checkpoints.manifest import FileEntry
from rekindle.errors import CheckpointError, CorruptError, MissingError
from rekindle.file_lock import NO_LOCKS

LOCK_FILE: Final = ".lock"

_PIECE = 4 << 20  # bytes per system call: small enough for the cache, large enough for the disk

_REMEDIES = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "free some space within the quota, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or use another file system",
    errno.EACCES: "give this user access to it, or choose another directory",
    errno.EPERM: "give this user access to it, or choose another directory",
    errno.EROFS: "mount it writable, or choose another directory",
    errno.ENOTDIR: "choose a directory, not a file",
    errno.EEXIST: "move the existing file away, or choose another directory",
    errno.EIO: "check the disk or the network storage",
}


@contextlib.contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the action, path, cause and remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that directory and its file system")
        raise CheckpointError(f"cannot {action} {path}: {error}; {remedy}") from error


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Wait for the lock of this root, and hold it. The kernel releases it when the process ends.

    On a file system without locks, the block runs without a lock. Two writers can then damage each
    other's checkpoint. Verification detects the damage.
    """
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        # close() alone does not release the lock if a process was forked after the lock was taken.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create the directory and its parents, and write each new name through to the disk."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write the names in this directory through to the disk."""
    with opened_directory(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Yield a descriptor of the directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[int]:
    """Create a directory and yield its descriptor. Remove the directory if the block fails."""
    path.mkdir()
    with opened_directory(path) as descriptor:
        try:
            yield descriptor
            os.fsync(descriptor)
            sync_directory(path.parent)
        except BaseException:
            # On a file system without locks, another writer may have replaced the directory.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    shutil.rmtree(path)
            raise


@contextlib.contextmanager
def new_file(directory: int, name: str) -> Iterator[int]:
    """Create a file and yield its descriptor. Remove the file if the block fails.

    directory: a descriptor. If the directory was removed, the function raises an error and does not
    write to a new directory of the same name.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=directory)
    try:
        yield descriptor
    except BaseException:
        # Another writer may have replaced the file.
        with contextlib.suppress(OSError):
            there = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if os.path.samestat(os.fstat(descriptor), there):
                os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def write_file(directory: int, name: str, chunks: Iterable[Bytes]) -> Sums:
    """Write a new file as write_through() does."""
    with new_file(directory, name) as descriptor:
        return write_through(descriptor, chunks)


def write_through(descriptor: int, chunks: Iterable[Bytes]) -> Sums:
    """Write the chunks through to the disk. Return their size and checksums."""
    sums = summed(_pieces_written(descriptor, chunks))
    os.fsync(descriptor)
    return sums


def check_in_place(descriptor: int, path: Path) -> None:
    """Raise CheckpointError unless the open file is the file at this path."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return
    raise CheckpointError(
        f"another process removed or replaced {path} during the write: it committed a newer "
        "checkpoint, or wrote the same file"
    )


def _pieces_written(descriptor: int, chunks: Iterable[Bytes]) -> Iterator[memoryview]:
    """Write the chunks in pieces. Yield each piece after it was written."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for begin in range(0, len(view), _PIECE):
            rest = piece = view[begin : begin + _PIECE]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            yield piece


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise CorruptError unless this is a plain file of the entry's size."""
    status = _plain(path)
    if status.st_size != entry.bytes:
        raise CorruptError(
            f"{entry.name} has {status.st_size} bytes, the manifest has {entry.bytes}"
        )


def verify_file(path: Path, entry: FileEntry) -> None:
    """Read the file. Raises CorruptError: it differs from the manifest. OSError: unreadable."""
    check_size(path, entry)
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_PIECE, entry.bytes) or 1))
        actual = checksum(buffer[:n] for n in iter(lambda: file.readinto(buffer), 0))
    if actual != entry.checksum:
        raise CorruptError(
            f"checksum of {entry.name} differs: it has {actual}, the manifest has {entry.checksum}"
        )


def read_range(path: Path, begin: int, end: int) -> memoryview:
    """Return the file's unverified bytes from `begin` to `end`, or fewer if it ends before.

    Raises MissingError, CorruptError if it is not a plain file, OSError if unreadable.
    """
    size = _plain(path).st_size
    with path.open("rb", buffering=0) as file:
        memory = private_memory(max(0, min(end, size) - begin))
        file.seek(begin)
        reached = 0
        while count := file.readinto(memory[reached:]):
            reached += count
    return memory[:reached]


def _plain(path: Path) -> os.stat_result:
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise MissingError(f"{path.name} is missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptError(f"{path.name} is not a plain file")
    return status


def load_into(path: Path, entry: FileEntry, begin: int, view: memoryview) -> None:
    """Fill the view with the file's bytes, starting at `begin`. Only their blocks are read.

    Raises CorruptError if they differ from the manifest, OSError if unreadable.
    """
    check_size(path, entry)
    with path.open("rb", buffering=0) as file:

        def fetch(offset: int, target: memoryview) -> None:
            file.seek(offset)
            while target and (count := file.readinto(target)):
                target = target[count:]

        for span in spans(entry, begin, begin + len(view)):
            read_span(entry, span, begin, view, fetch)


def private_memory(size: int) -> memoryview:
    """Return `size` bytes of memory, page-aligned and writable, that no other process shares."""
    if not size:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
