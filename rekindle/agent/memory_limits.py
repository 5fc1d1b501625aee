"""The memory that this process can still take, and the buffers of snapshots that take it.

The kernel's OOM killer ends a process that takes more. The agent allocates the complete memory of a
buffer before a rank writes, so that the rank never waits for memory.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import psutil

from rekindle.protocol.snapshot_buffer import CONTROL_BYTES

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")
_ZEROS_BYTES = 1 << 20  # the size of one write


def available_bytes(root: Path = ROOT, proc: Path = PROC) -> int:
    """Return the bytes that this process can take before an OOM kill; cached files count."""
    left = (_left(folder) for folder in memory_cgroups(root, proc))
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def memory_cgroups(root: Path = ROOT, proc: Path = PROC) -> list[Path]:
    """Return the folders of the cgroups that limit this process's memory, its own first.

    A container sees only some cgroups above its own, or none; then its own is the root.
    root: where the cgroup file systems are mounted.
    """
    folders: list[Path] = []
    for line in read_lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "memory" if controllers else root  # cgroup v1, or v2
        own = mounted / os.path.normpath(path).lstrip("/")
        folders += [each for each in (own, *own.parents) if each.is_relative_to(mounted)]
    return [folder for folder in folders if folder.is_dir()]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; empty: the kernel lacks it, and its values are unknown."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _left(cgroup: Path) -> int | None:
    """Return the free bytes below the limit of a cgroup; None: it has no limit."""
    limit = _number(cgroup, "memory.max", "memory.limit_in_bytes")
    used = _number(cgroup, "memory.current", "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _cached(cgroup)


def _number(cgroup: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one; None: no file has one."""
    for name in names:
        try:
            return int((cgroup / name).read_text())
        except (OSError, ValueError):  # "max" means no limit
            continue
    return None


def _cached(cgroup: Path) -> int:
    """Return the bytes that the kernel can free, mainly of files; shared memory does not count."""
    stat = dict(line.split() for line in read_lines(cgroup / "memory.stat"))
    # In v1 the counts with "total" include the cgroups below, as the usage does.
    kinds = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)


class _ReservedMemory:
    """Memory that buffers will take but have not taken yet; the agent makes several at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def promise(self, size: int) -> None:
        """Reserve memory. Raises OSError: there is not enough."""
        with self._lock:
            left = available_bytes() - self._bytes
            if size > left:
                raise OSError(errno.ENOMEM, f"this node has only {max(0, left)} bytes left")
            self._bytes += size

    def keep(self, size: int) -> None:
        """Release a reservation of memory that is taken now, or not needed."""
        with self._lock:
            self._bytes -= size


_reserved_memory = _ReservedMemory()


def create_buffer(name: str, data_bytes: int, stop: threading.Event | None = None) -> int:
    """Make the memory file of a buffer for `data_bytes`, and return its descriptor.

    The time grows with the size (0.4 s a GB, and more). stop: if it is set, this gives up.
    Raises OSError: there is not enough memory, or `stop` is set.
    """
    size = CONTROL_BYTES + data_bytes
    _reserved_memory.promise(size)
    done, fd = 0, -1
    try:
        fd = os.memfd_create(f"rekindle-{name}")
        # The kernel clears reserved memory (posix_fallocate) only at the first access. A rank would
        # do that while training waits.
        zeros = memoryview(bytes(min(size, _ZEROS_BYTES)))
        while done < size:
            if stop is not None and stop.is_set():
                raise OSError(errno.ECANCELED, "the agent does not need this buffer any longer")
            wrote = os.pwrite(fd, zeros[: size - done], done)
            _reserved_memory.keep(wrote)
            done += wrote
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        _reserved_memory.keep(size - done)
    return fd
