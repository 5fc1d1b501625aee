"""One rank, as the coordinator knows it, and how many are where."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from rekindle.protocol import agent as p


class Status(str, enum.Enum):
    """Where one rank is."""

    ABSENT = "absent"  # no process
    SPAWNING = "spawning"  # its agent was told to start it
    STARTING = "starting"  # a process that has not reached its Session (untouched: runs the script)
    LEAVING = "leaving"  # told that its generation is over
    WAITING = "waiting"  # arrived, waits for a generation
    RESTORING = "restoring"  # formed, takes its state
    TRAINING = "training"
    ENDING = "ending"  # being killed on our order
    EXITED = "exited"  # ended well


GONE = (Status.ABSENT, Status.EXITED)
_IN_GENERATION = (Status.TRAINING, Status.RESTORING, Status.LEAVING)


class RankIndex:
    """Which ranks of the world are in which status, and which have stepped: counted as it changes.

    Nearly every message asks whether all ranks are somewhere; looking at each of them every time
    would cost the square of their number. outside: ranks that take no part in the world now.
    """

    def __init__(self, world_size: int) -> None:
        self.status: dict[Status, set[int]] = {status: set() for status in Status}
        self.status[Status.ABSENT].update(range(world_size))
        self.stepped: set[int] = set()
        self.outside: set[int] = set()


class Rank:
    """One rank. finished: steps; stepped: it has finished one in this generation.

    shard: the number of its piece of the training state; None: all of it, or unknown.
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
        """Where it is."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        if self.inside:
            self._census.status[self._status].remove(self.rank)
            self._census.status[status].add(self.rank)
        self._status = status

    @property
    def goes_on(self) -> bool:
        """Whether its process has been in a generation: who only waits may be as new as others."""
        known = self.arrived is not None and self.arrived.finished is not None
        return self._status in _IN_GENERATION or (self._status is Status.WAITING and known)

    @property
    def inside(self) -> bool:
        """Whether it is in the world."""
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
        """Whether it has finished a step in this generation."""
        return self.rank in self._census.stepped

    @stepped.setter
    def stepped(self, stepped: bool) -> None:
        if stepped:
            self._census.stepped.add(self.rank)
        else:
            self._census.stepped.discard(self.rank)


def group_by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Sort ranks by the nodes they belong to."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return found
