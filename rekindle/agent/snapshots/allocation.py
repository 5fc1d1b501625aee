"""The memory of snapshot buffers, which the agent allocates completely before a rank writes."""

from __future__ import annotations

import errno
import os
import threading

from rekindle.agent.memory_limits import available_bytes
from rekindle.protocol.snapshot_buffer import CONTROL_BYTES

_ZEROS_BYTES = 1 << 20  # the size of one write


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
