"""A rank's heartbeat: one shared page that the rank writes and its agent reads.

A beat is a store to memory: no lock, no system call. The page is a memory file of the agent, so it
outlives the rank: after a kill it still says where the rank was.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from typing import NamedTuple

from rekindle.errors import ProtocolError

PAGE_BYTES = 64 * 1024
_FIELDS = 16
RECENT = 32  # operations of which the page knows what they were
_HEAD_BYTES = 8 * (_FIELDS + RECENT)
BEAT_S = 0.25
SLOWEST_BEAT_S = 2.0  # before the coordinator would ask with a ping
BEATS_PER_S = 4096  # of all agents together, as long as they beat that often
RECORD_BYTES = PAGE_BYTES - _HEAD_BYTES

# Slots of the head, 8 bytes each: aligned, so that a reader never sees half a number.
_FINISHED, _IN_UPDATE, _BEAT_NS, _TOTAL, _RECORD, _DOING, _MEETINGS, _WAITING_NS, _OPERATIONS = (
    range(9)
)
_NONE = -1

# For what may take long where the process computes, and for a slow disk. Others wait in a
# collective meanwhile, and no time-out for that is longer: 10 min of NCCL in torch, 30 of HCCL.
BUSY_S = 1800.0


class RankActivity(enum.IntEnum):
    """What a rank is at; how long that may take differs (see rekindle.agent.lateness)."""

    OUTSIDE = 0  # of a Session: in an untouched script, before it or behind it
    MEETING = 1  # forms a generation and takes its state; the coordinator has limits for that
    FIRST = 2  # the first step of a generation: compiles, sets up libraries
    STEP = 3
    BETWEEN = 4  # two steps, where a script may do what it likes
    CHECKPOINT = 5  # its state is kept
    EVALUATE = 6
    COMPILE = 7


class PageReading(NamedTuple):
    """What a page shows: while it stays the same, the rank is at the same thing.

    since_ns: when it began that, by the node's monotonic clock. meetings: how often it has formed a
    generation, or tried to.
    """

    finished: int
    doing: RankActivity
    since_ns: int
    meetings: int = 0


def beat_interval(nodes: int) -> float:
    """Return how many seconds an agent in a job of so many nodes leaves between its beats."""
    return min(SLOWEST_BEAT_S, max(BEAT_S, nodes / BEATS_PER_S))


class HeartbeatPage:
    """The heartbeat page, seen from either side. Without a descriptor no other process sees it."""

    def __init__(self, fd: int = -1) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._head = memoryview(self._map)[:_HEAD_BYTES].cast("q")
        self._record = memoryview(self._map)[_HEAD_BYTES:]

    @staticmethod
    def create(name: str) -> int:
        """Make a page and return its file descriptor."""
        fd = os.memfd_create(f"rekindle-{name}")
        os.ftruncate(fd, PAGE_BYTES)
        page = HeartbeatPage(fd)
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

    def begin(self, doing: RankActivity) -> None:
        """Say what the rank is at from now on."""
        head = self._head
        head[_DOING] = doing
        head[_MEETINGS] += doing is RankActivity.MEETING
        head[_BEAT_NS] = time.monotonic_ns()

    @property
    def mark(self) -> PageReading:
        """What the rank is at, and since when."""
        head = self._head
        doing = RankActivity(head[_DOING])
        return PageReading(max(head[_FINISHED], 0), doing, head[_BEAT_NS], head[_MEETINGS])

    def new_life(self) -> None:
        """Forget what a dead process of the rank was at; how far it had come stays."""
        self.form()
        self.begin(RankActivity.OUTSIDE)

    def form(self) -> None:
        """A process group is new: nothing was begun in it."""
        self._head[_WAITING_NS] = self._head[_OPERATIONS] = 0

    def wait(self, waiting: bool) -> None:
        """Say that some operation of the process group is under way, or that none is any more."""
        self._head[_WAITING_NS] = time.monotonic_ns() if waiting else 0

    def begin_operation(self, mark: int) -> None:
        """Say that one more collective was begun. mark: a positive number that tells which."""
        head = self._head
        head[_FIELDS + head[_OPERATIONS] % RECENT] = mark
        head[_OPERATIONS] += 1

    @property
    def waiting_since_ns(self) -> int:
        """Since when the rank waits for others in a collective, 0 if it does not."""
        return self._head[_WAITING_NS]

    @property
    def operations(self) -> int:
        """Collectives of the process group begun so far."""
        return self._head[_OPERATIONS]

    @property
    def recent(self) -> tuple[int, ...]:
        """What the newest of them were, oldest first."""
        count = self._head[_OPERATIONS]
        first = max(0, count - RECENT)
        return tuple(self._head[_FIELDS + number % RECENT] for number in range(first, count))

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
