"""A rank's heartbeat: one shared page that the rank writes and its agent reads.

A beat is a store to memory: no lock, no system call. The page is a memory file of the agent, so it
outlives the rank: after a kill it still says where the rank was.
"""

from __future__ import annotations

import mmap
import os
import time

from rekindle.errors import ProtocolError

PAGE_BYTES = 64 * 1024
_HEAD_BYTES = 128
BEAT_S = 0.25
SLOWEST_BEAT_S = 2.0  # before the coordinator would ask with a ping
BEATS_PER_S = 4096  # of all agents together, as long as they beat that often
RECORD_BYTES = PAGE_BYTES - _HEAD_BYTES

# Slots of the head, 8 bytes each: aligned, so that a reader never sees half a number.
_FINISHED, _IN_UPDATE, _BEAT_NS, _TOTAL, _RECORD = range(5)
_NONE = -1


def beat_interval(nodes: int) -> float:
    """Return how many seconds an agent in a job of so many nodes leaves between its beats."""
    return min(SLOWEST_BEAT_S, max(BEAT_S, nodes / BEATS_PER_S))


class Page:
    """The heartbeat page, seen from either side."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._head = memoryview(self._map)[:_HEAD_BYTES].cast("q")
        self._record = memoryview(self._map)[_HEAD_BYTES:]

    @staticmethod
    def create(name: str) -> int:
        """Make a page and return its file descriptor."""
        fd = os.memfd_create(f"rekindle-{name}")
        os.ftruncate(fd, PAGE_BYTES)
        page = Page(fd)
        page._head[_FINISHED] = _NONE
        page.close()
        return fd

    def close(self) -> None:
        """Unmap the page."""
        self._head.release()
        self._record.release()
        self._map.close()

    def beat(self, finished: int) -> None:
        """Say that `finished` steps are finished and the next has begun."""
        head = self._head
        head[_FINISHED] = finished
        head[_IN_UPDATE] = 0
        head[_BEAT_NS] = time.monotonic_ns()

    def begin_update(self) -> None:
        """Say that the optimizer now changes the state: until the next beat it is of no step."""
        self._head[_IN_UPDATE] = 1

    @property
    def in_update(self) -> bool:
        """Whether the state is inside an update."""
        return bool(self._head[_IN_UPDATE])

    @property
    def finished(self) -> int | None:
        """Steps finished, None before the first beat."""
        finished = self._head[_FINISHED]
        return None if finished == _NONE else finished

    @property
    def total(self) -> int:
        """Steps the rank was asked for; 0 = not said yet."""
        return self._head[_TOTAL]

    @total.setter
    def total(self, steps: int) -> None:
        self._head[_TOTAL] = steps

    def put_record(self, record: bytes) -> None:
        """Show the newest record of the rank.

        Raises ProtocolError: it is longer than RECORD_BYTES.
        """
        if len(record) > RECORD_BYTES:
            raise ProtocolError(
                f"a step record of {len(record)} bytes is too long; {RECORD_BYTES} fit"
            )
        self._head[_RECORD] = 0
        self._record[: len(record)] = record
        self._head[_RECORD] = len(record)

    def last_record(self) -> bytes:
        """Return the newest record, empty if there is none. For display: it may be torn."""
        return bytes(self._record[: self._head[_RECORD]])
