"""A rank's heartbeat: one shared page that the rank writes and its agent reads.

A beat is a store to memory, without a lock or a system call. The page is a memory file of the
agent, so it outlives the rank: after a kill it still shows the rank's last activity.
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
RECENT = 32  # newest operations that the page identifies
_NUMBERS = 4  # of one digest
DIGESTS = 64  # newest digests on the page; two beats are never as far apart
_HEAD_BYTES = 8 * (_FIELDS + RECENT + _NUMBERS * DIGESTS)
BEAT_S = 0.25
SLOWEST_BEAT_S = 2.0  # the coordinator sends a ping only after a longer silence
BEATS_PER_S = 4096  # the beats of all agents together, as long as each agent beats that often
RECORD_BYTES = PAGE_BYTES - _HEAD_BYTES

# Slots of the head, 8 bytes each and aligned, so that a reader never sees half a number.
_FINISHED, _IN_UPDATE, _BEAT_NS, _TOTAL, _RECORD, _DOING, _MEETINGS, _WAITING_NS = range(8)
_OPERATIONS, _DIGESTED, _COMPARED, _EQUAL = range(8, 12)
_FIRST_DIGEST = _FIELDS + RECENT
_NONE = -1

# A limit for long computations of the process, and for a slow disk. Other ranks wait in a
# collective, and no collective has a longer timeout: 10 min of NCCL in torch, 30 of HCCL.
BUSY_S = 1800.0


class RankActivity(enum.IntEnum):
    """A rank's activity. Each one has its own time limit (see rekindle.agent.lateness)."""

    OUTSIDE = 0  # not in a Session: before it, after it, or in a script without one
    MEETING = 1  # forms a generation and receives its state; the coordinator has limits for that
    FIRST = 2  # the first step of a generation: compiles, sets up libraries
    STEP = 3
    BETWEEN = 4  # between two steps, where a script may do anything
    CHECKPOINT = 5  # copies its state to a snapshot
    EVALUATE = 6
    COMPILE = 7


class PageReading(NamedTuple):
    """The values of a page. While they stay equal, the rank is in the same activity.

    since_ns: the start of the activity, by the node's monotonic clock. meetings: how often the rank
    has formed a generation, or tried to.
    """

    finished: int
    doing: RankActivity
    since_ns: int
    meetings: int = 0


class StateDigest(NamedTuple):
    """A digest of the state after `step` steps, which `generation` finished last.

    item: 0: the state that ranks share: parameters and optimizer. Otherwise the number of another
    object in `Arrived.items`, from 1. value: 64 bits, as a signed number.
    """

    step: int
    generation: int
    item: int
    value: int


def beat_interval(nodes: int) -> float:
    """Return the seconds between two heartbeats of an agent in a job of `nodes` nodes."""
    return min(SLOWEST_BEAT_S, max(BEAT_S, nodes / BEATS_PER_S))


class HeartbeatPage:
    """The heartbeat page, for both sides. Without a descriptor no other process sees it."""

    def __init__(self, fd: int = -1) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._head = memoryview(self._map)[:_HEAD_BYTES].cast("q")
        self._record = memoryview(self._map)[_HEAD_BYTES:PAGE_BYTES]

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
        """Record that `finished` steps are finished and the next one has begun."""
        head = self._head
        head[_FINISHED] = finished
        head[_IN_UPDATE] = 0
        head[_BEAT_NS] = time.monotonic_ns()

    def begin(self, doing: RankActivity) -> None:
        """Record that the rank begins this activity."""
        head = self._head
        head[_DOING] = doing
        head[_MEETINGS] += doing is RankActivity.MEETING
        head[_BEAT_NS] = time.monotonic_ns()

    @property
    def mark(self) -> PageReading:
        """The rank's activity, and its start."""
        head = self._head
        doing = RankActivity(head[_DOING])
        return PageReading(max(head[_FINISHED], 0), doing, head[_BEAT_NS], head[_MEETINGS])

    def new_life(self) -> None:
        """Clear the activity of the rank's dead process, and keep its number of finished steps."""
        self.form()
        self.begin(RankActivity.OUTSIDE)

    def form(self) -> None:
        """Record a new process group: no operation has begun in it."""
        self._head[_WAITING_NS] = self._head[_OPERATIONS] = 0

    def wait(self, waiting: bool) -> None:
        """Record whether an operation of the process group is running."""
        self._head[_WAITING_NS] = time.monotonic_ns() if waiting else 0

    def begin_operation(self, mark: int) -> None:
        """Record that a collective begins. mark: a positive number that identifies it."""
        head = self._head
        head[_FIELDS + head[_OPERATIONS] % RECENT] = mark
        head[_OPERATIONS] += 1

    @property
    def waiting_since_ns(self) -> int:
        """The time since which the rank waits for others in a collective; 0: it does not wait."""
        return self._head[_WAITING_NS]

    @property
    def operations(self) -> int:
        """The number of collectives of the process group that have begun."""
        return self._head[_OPERATIONS]

    @property
    def recent(self) -> tuple[int, ...]:
        """The marks of the newest collectives, oldest first."""
        count = self._head[_OPERATIONS]
        first = max(0, count - RECENT)
        return tuple(self._head[_FIELDS + number % RECENT] for number in range(first, count))

    def put_digest(self, digest: StateDigest) -> None:
        """Show a digest of the rank's state."""
        head = self._head
        at = _FIRST_DIGEST + head[_DIGESTED] % DIGESTS * _NUMBERS
        for number in range(_NUMBERS):
            head[at + number] = digest[number]
        head[_DIGESTED] += 1
        head[_COMPARED] = digest.step

    def digests_after(self, count: int) -> tuple[int, tuple[StateDigest, ...]]:
        """Return the number of all digests so far, and those after the first `count` ones.

        The page has the newest DIGESTS ones. A digest that its rank overwrites meanwhile is absent.
        """
        head, written = self._head, self._head[_DIGESTED]
        found = {}
        for number in range(max(count, written - DIGESTS), written):
            at = _FIRST_DIGEST + number % DIGESTS * _NUMBERS
            found[number] = StateDigest(*head[at : at + _NUMBERS])
        oldest = head[_DIGESTED] - DIGESTS  # this one may be overwritten now
        return written, tuple(each for number, each in found.items() if number > oldest)

    @property
    def compared(self) -> tuple[int, int]:
        """The newest step with a digest, and the newest one after which all ranks agreed."""
        return self._head[_COMPARED], self._head[_EQUAL]

    def agreed(self, step: int) -> None:
        """Record that all ranks held the same state after this step. Only the agent calls this."""
        self._head[_EQUAL] = step

    def begin_update(self) -> None:
        """Record that an update begins: the state belongs to no step until the next beat."""
        self._head[_IN_UPDATE] = 1

    @property
    def in_update(self) -> bool:
        """Whether an update is changing the state."""
        return bool(self._head[_IN_UPDATE])

    @property
    def finished(self) -> int | None:
        """The number of finished steps; None: before the first beat."""
        finished = self._head[_FINISHED]
        return None if finished == _NONE else finished

    @property
    def total(self) -> int:
        """The number of steps that the script wants; 0: not known yet."""
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
        """Return the newest record, empty if there is none. Only for display: it may be torn."""
        return bytes(self._record[: self._head[_RECORD]])
