"""Nodes that are out of use, and who takes their places: spares first, then whoever is mended."""

from __future__ import annotations

import heapq
import math


class Pool:
    """The nodes beside those that train; times in seconds since the job began.

    spares: None: as many as there ever have to be. Nodes and spares are all that there is: a node
    that is left comes back as a spare once it is mended.
    """

    def __init__(self, spares: int | None) -> None:
        self._endless = spares is None
        self._ready = [-math.inf] * (spares or 0)  # when each can be used, the earliest first
        self._out: list[float] = []  # until when each node is out of use
        self._out_alone: list[float] = []  # the same of those that were not lost with their group
        self.lost = 0  # nodes in all

    def free(self, now: float) -> int:
        """Return how many spares wait."""
        if self._endless:
            return 1_000_000
        return sum(at <= now for at in self._ready)

    def out(self, now: float, *, alone: bool = False) -> int:
        """Return how many nodes are out of use; alone: those apart that were lost in groups."""
        found = self._out_alone if alone else self._out
        while found and found[0] <= now:
            heapq.heappop(found)
        return len(found)

    def lose(self, now: float, repair_s: float, *, alone: bool) -> None:
        """Take a node out of use. alone: not together with its group."""
        heapq.heappush(self._out, now + repair_s)
        if alone:
            heapq.heappush(self._out_alone, now + repair_s)
        self.lost += 1
        if not self._endless:
            heapq.heappush(self._ready, now + repair_s)

    def take(self, now: float) -> float:
        """Have the next node take a place; return when it can."""
        return now if self._endless else max(now, heapq.heappop(self._ready))
