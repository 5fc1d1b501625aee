"""The journal on disk, and its followers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from rekindle.errors import JobError
from rekindle.recovery.journal import journal
from rekindle.waiting import retry

_KEEPALIVE = b'{"type":"keepalive"}'

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # a network filesystem that has none
LOCK_S = 10.0  # how long the coordinator of an earlier attempt may take to end


class JournalFile:
    """Appends events to a file of JSON lines and hands them to whoever follows.

    A torn last line (the writer was killed) is cut off, so that what follows stays readable. A disk
    that is full stops nothing: events wait in memory until they can be written.

    Raises JobError: another process still writes it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(self._fd, path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self.events: list[journal.Event] = list(journal.read(lines))
        self._path = path
        self._end = sum(map(len, lines))  # of what is written in full
        os.ftruncate(self._fd, self._end)
        self._earlier = len(self.events)
        self._unwritten: deque[bytes] = deque()
        self._failed = False
        self._followers: set[asyncio.Queue[journal.Event]] = set()

    def append(self, event: journal.Event) -> None:
        """Number, time and write one event."""
        event = msgspec.structs.replace(event, seq=len(self.events) + 1, at=time.time())
        self.events.append(event)
        self._unwritten.append(journal.encode(event) + b"\n")
        self._write()
        self.publish(event)

    def publish(self, event: journal.Event) -> None:
        """Hand an event to the followers without keeping it."""
        for follower in self._followers:
            follower.put_nowait(event)

    def close(self) -> None:
        """Make the file last."""
        self._write()
        with contextlib.suppress(OSError):  # told when it was written
            os.fsync(self._fd)
        os.close(self._fd)

    def _write(self) -> None:
        """Write what waits, line by line, and leave no part of a line that does not fit."""
        try:
            while self._unwritten:
                line = self._unwritten[0]
                written = os.pwrite(self._fd, line, self._end)
                if written < len(line):
                    os.ftruncate(self._fd, self._end)
                    return
                self._end += written
                self._unwritten.popleft()
        except OSError as error:
            if not self._failed:
                self._failed = True
                text = f"{self._path}: {error.strerror}; events are kept in memory for now"
                print(f"rekindle coordinator: {text}", file=sys.stderr, flush=True)

    async def follow(self, since: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yield every event after `since` as a JSON line, up to the end of this attempt.

        Between events a keepalive comes every `keepalive_s` seconds.
        """
        queue: asyncio.Queue[journal.Event] = asyncio.Queue()
        for event in self.events[since:]:
            queue.put_nowait(event)
        self._followers.add(queue)
        ended = False
        try:
            while not ended:
                try:
                    # The start of a big world makes thousands of events: a timer only to wait.
                    limit_s = keepalive_s if queue.empty() else None
                    event = await asyncio.wait_for(queue.get(), limit_s)
                except asyncio.TimeoutError:
                    yield _KEEPALIVE
                    continue
                yield journal.encode(event)
                # The ends of earlier attempts are history.
                ended = isinstance(event, journal.Ended) and event.seq > self._earlier
        finally:
            self._followers.discard(queue)


def _lock(fd: int, path: Path) -> None:
    """Be the only writer for as long as `fd` is open; two would write over each other."""
    lock = functools.partial(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        retry(lock, BlockingIOError, LOCK_S, 0.02)
    except BlockingIOError as error:
        raise JobError(f"{path} is written by another coordinator of this job") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
