"""The file of a job's journal, for its one writer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rekindle.console import say
from rekindle.errors import JobError
from rekindle.file_lock import NO_LOCKS
from rekindle.job.journal_reader import complete_lines
from rekindle.recovery.journal import journal
from rekindle.waiting import retry

_LIBC = ctypes.CDLL(None)

# Space on the disk that the file has in advance, enough for hundreds of events. So the end of a job
# is in the journal also if the disk stays full.
RESERVED_BYTES = 256 << 10
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)

LOCK_S = 10.0  # seconds that the coordinator of an earlier attempt may take to end


class JournalFile:
    """Appends events to a file of JSON lines.

    It cuts off a last line that a killed writer left incomplete, so that the lines after it stay
    readable. A full disk stops nothing: events first use the space that the file has in advance,
    and then wait in memory until the file can take them.

    known: the events in the file when this object was made.

    Raises JobError: another process still writes the file.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(self._fd, path)
        lines = complete_lines(path)
        self.known: list[journal.Event] = list(journal.read(lines))
        self._path = path
        self._end = sum(map(len, lines))  # the length of all complete lines
        os.ftruncate(self._fd, self._end)
        self._reserved = 0  # the file has space on the disk up to this length
        self._reserve()
        self._unwritten: deque[bytes] = deque()
        self._failed = False

    def write(self, events: Iterable[journal.Event]) -> None:
        """Write events, after those that wait. They wait in memory if the file system refuses."""
        self._unwritten.extend(journal.encode(event) + b"\n" for event in events)
        self._write()

    def close(self) -> None:
        """Write the events that wait, flush the file to the disk, and close it."""
        self._write()
        if self._unwritten:
            self.report(
                f"the coordinator lost events at the end of the attempt: {len(self._unwritten)}"
            )
        with contextlib.suppress(OSError):  # the write has reported it already
            os.ftruncate(self._fd, self._end)  # this gives up the space that is left
            os.fsync(self._fd)
        os.close(self._fd)

    def _write(self) -> None:
        """Write the events that wait, line by line; remove a line that does not fit completely."""
        try:
            while self._unwritten:
                line = self._unwritten[0]
                written = os.pwrite(self._fd, line, self._end)
                if written < len(line):
                    os.ftruncate(self._fd, self._end)  # this also gives up reserved space
                    self._reserved = self._end
                    raise OSError(errno.ENOSPC, "the file system wrote only a part of an event")
                self._end += written
                self._unwritten.popleft()
                self._failed = False
                self._reserve()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.report(
                    f"{error.strerror}; the coordinator keeps events in memory until it can "
                    "write again"
                )

    def report(self, text: str) -> None:
        """Print a text about this file."""
        say(f"{self._path}: {text}", logging.ERROR)

    def _reserve(self) -> None:
        """Reserve space on the disk after the end of the file, if too little is left of it.

        A file system may not support this, or may be full. Then events wait in memory.
        """
        if self._reserved - self._end < RESERVED_BYTES // 2:
            length = ctypes.c_long(RESERVED_BYTES)
            if _LIBC.fallocate(self._fd, _KEEP_SIZE, ctypes.c_long(self._end), length) == 0:
                self._reserved = self._end + RESERVED_BYTES


def _lock(fd: int, path: Path) -> None:
    """Become the only writer while `fd` is open; two writers would overwrite each other.

    Raises JobError: another coordinator of this job holds the lock.
    """
    lock = functools.partial(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        retry(lock, BlockingIOError, LOCK_S, 0.02)
    except BlockingIOError as error:
        raise JobError(f"another coordinator of this job writes {path}") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
