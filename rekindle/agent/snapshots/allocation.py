"""The memory of snapshot buffers: all of it is there before a rank writes."""

from __future__ import annotations

import errno
import os
import threading

from rekindle.agent.memory_limits import available_bytes
from rekindle.protocol.snapshot_buffer import CONTROL_BYTES

_ZEROS_BYTES = 1 << 20  # written at once


class _Promised:
    """Memory that is promised to buffers and not taken yet: several are made at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def promise(self, size: int) -> None:
        """Raises OSError: there is not as much."""
        with self._lock:
            left = available_bytes() - self._bytes
            if size > left:
                raise OSError(errno.ENOMEM, f"{max(0, left)} bytes are left here")
            self._bytes += size

    def keep(self, size: int) -> None:
        """So much is taken now, or not needed any more."""
        with self._lock:
            self._bytes -= size


_promised = _Promised()


def create_buffer(name: str, data_bytes: int, stop: threading.Event | None = None) -> int:
    """Make the memory file of a buffer for `data_bytes`, and return its descriptor.

    Takes as long as there are bytes (0.4 s a GB, and more). stop: if set meanwhile, it is given up.
    Raises OSError: they are not to be had, or it was given up.
    """
    size = CONTROL_BYTES + data_bytes
    _promised.promise(size)
    done, fd = 0, -1
    try:
        fd = os.memfd_create(f"rekindle-{name}")
        # Memory that is only reserved (posix_fallocate) is cleared when it is first touched: by a
        # rank, while training waits.
        zeros = memoryview(bytes(min(size, _ZEROS_BYTES)))
        while done < size:
            if stop is not None and stop.is_set():
                raise OSError(errno.ECANCELED, "it is not needed any more")
            wrote = os.pwrite(fd, zeros[: size - done], done)
            _promised.keep(wrote)
            done += wrote
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        _promised.keep(size - done)
    return fd
