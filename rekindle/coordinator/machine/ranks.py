"""One rank, as the coordinator knows it, and the number of ranks in each status."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from rekindle.protocol import agent as p


class Status(str, enum.Enum):
    """The status of one rank."""

    ABSENT = "absent"  # no process
    SPAWNING = "spawning"  # its agent has the order to start it
    STARTING = "starting"  # a process before its Session (without a Session: it runs the script)
    LEAVING = "leaving"  # has the order to leave its generation
    WAITING = "waiting"  # has arrived, and waits for a generation
    RESTORING = "restoring"  # loads its state for a formed generation
    TRAINING = "training"
    ENDING = "ending"  # the agent is ending it on the coordinator's order
    EXITED = "exited"  # ended with exit status 0


GONE = (Status.ABSENT, Status.EXITED)
_IN_GENERATION = (Status.TRAINING, Status.RESTORING, Status.LEAVING)


class RankIndex:
    """The ranks of the world by status, and the ranks that have stepped.

    The index changes with every rank, because nearly every message asks for the status of all
    ranks. A loop over all ranks for each message would take time with the square of their number.
    outside: ranks outside the world.
    """

    def __init__(self, world_size: int) -> None:
        self.status: dict[Status, set[int]] = {status: set() for status in Status}
        self.status[Status.ABSENT].update(range(world_size))
        self.stepped: set[int] = set()
        self.outside: set[int] = set()


class Rank:
    """One rank. finished: steps; stepped: whether it has finished one in this generation.

    shard: the number of its shard of the training state; None: it has the complete state, or it is
    unknown.
    """

    __slots__ = ("_census", "_status", "arrived", "finished", "node", "pid", "rank", "shard")

    def __init__(self, rank: int, node: int, census: RankIndex) -> None:
        self.rank = rank
        self.node = node
        self.pid = 0
        self.shard: int | None = None
        self.arrived: p.Arrived | None = None
        self.finished = 0
        self._status = Status.ABSENT
        self._census = census

    @property
    def status(self) -> Status:
        """Return its status."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        if self.inside:
            self._census.status[self._status].remove(self.rank)
            self._census.status[status].add(self.rank)
        self._status = status

    @property
    def goes_on(self) -> bool:
        """Return whether its process has been in a generation. A process that waits may be new."""
        known = self.arrived is not None and self.arrived.finished is not None
        return self._status in _IN_GENERATION or (self._status is Status.WAITING and known)

    @property
    def inside(self) -> bool:
        """Return whether it is in the world."""
        return self.rank not in self._census.outside

    @inside.setter
    def inside(self, inside: bool) -> None:
        if inside == self.inside:
            return
        self.stepped = False
        if inside:
            self._census.outside.remove(self.rank)
            self._census.status[self._status].add(self.rank)
        else:
            self._census.status[self._status].remove(self.rank)
            self._census.outside.add(self.rank)

    @property
    def stepped(self) -> bool:
        """Return whether it has finished a step in this generation."""
        return self.rank in self._census.stepped

    @stepped.setter
    def stepped(self, stepped: bool) -> None:
        if stepped:
            self._census.stepped.add(self.rank)
        else:
            self._census.stepped.discard(self.rank)


def group_by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Group ranks by their node."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return found
