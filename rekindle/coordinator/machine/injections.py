"""Faults that ranks were told to suffer in steps to come, and that outlive the processes told."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.coordinator.machine.ranks import Rank
from rekindle.protocol.agent import Inject


class Injections:
    """Orders that name a step, each with the process that was told of it (0: none yet)."""

    def __init__(self) -> None:
        self._orders: list[tuple[Inject, int]] = []

    def add(self, order: Inject, told: int) -> None:
        """Keep an order until its step is past."""
        self._orders.append((order, told))

    def due(self, rank: Rank) -> list[Inject]:
        """Return what the rank's process, which goes on after `rank.finished`, has to be told."""
        mine = [o for o, told in self._orders if o.rank == rank.rank and not told]
        self._orders = [(o, told) for o, told in self._orders if o not in mine]
        due = [order for order in mine if (order.step or 0) >= rank.finished]
        self._orders += [(order, rank.pid) for order in due]
        return due

    def died(self, rank: Rank) -> None:
        """The rank's process is dead: what it did not live to see is for the next one."""
        left = []
        for order, told in self._orders:
            if told != rank.pid:
                left.append((order, told))
            elif (order.step or 0) > rank.finished:
                left.append((order, 0))
        self._orders = left

    def lost(self, ranks: Iterable[Rank]) -> None:
        """A node is gone, and how far its ranks had come is not known well enough."""
        pids = {rank.pid for rank in ranks if rank.pid}
        self._orders = [(order, told) for order, told in self._orders if told not in pids]
