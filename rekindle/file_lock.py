"""A lock on a file, held by one process at a time. The kernel frees the lock of a dead process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# The errors of a network filesystem without locks. locked() raises them; a caller that can work
# without a lock ignores them.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Hold the lock on a file. Creates the file if it does not exist, and yields its descriptor.

    busy: this function calls it before it waits for another process that holds the lock. It may
    raise an error instead.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
