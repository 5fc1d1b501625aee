"""Orders to inject faults at later steps. An order may outlast the process that received it."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.coordinator.machine.job_state import ENDING, JobState, Send
from rekindle.coordinator.machine.roster import Rank, Status
from rekindle.protocol.agent import Inject, InjectionKind


class Injections:
    """Orders that name a step, by rank, each with the process that received it (0: none yet)."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._roster = job.roster
        self._spec = job.spec
        self.orders: dict[int, list[tuple[Inject, int]]] = {}

    def add(self, order: Inject, pid: int) -> None:
        """Keep an order until its step is past. pid: the process that received it, or 0."""
        self.orders.setdefault(order.rank, []).append((order, pid))

    def due(self, rank: Rank) -> list[Inject]:
        """Return the orders for the rank's process, which continues after `rank.finished`."""
        orders = self.orders[rank.rank]
        due = [order for order, pid in orders if not pid and (order.step or 0) >= rank.finished]
        received = [(order, pid) for order, pid in orders if pid]
        self.orders[rank.rank] = received + [(order, rank.pid) for order in due]
        return due

    def died(self, rank: Rank) -> None:
        """Handle the end of the rank's process. Its next process gets the orders of later steps."""
        self.orders[rank.rank] = [
            (order, 0 if pid == rank.pid else pid)
            for order, pid in self.orders[rank.rank]
            if pid != rank.pid or (order.step or 0) > rank.finished
        ]

    def give_back(self, ranks: Iterable[Rank]) -> None:
        """Let other processes of these ranks, which all wait, get the orders of later steps."""
        for rank in ranks:
            orders = self.orders.get(rank.rank, [])
            if orders:
                left = [
                    order for order, pid in orders if not pid or (order.step or 0) >= rank.finished
                ]
                self.orders[rank.rank] = [(order, 0) for order in left]

    def lost(self, ranks: Iterable[Rank]) -> None:
        """Drop the orders of a lost node: its ranks may have finished further steps."""
        for rank in ranks:
            if rank.rank in self.orders:
                orders = self.orders[rank.rank]
                self.orders[rank.rank] = [(order, pid) for order, pid in orders if not pid]

    def inject(self, order: Inject) -> str:
        """Inject a fault into a rank. Return why this is impossible, or an empty text.

        An order for a step waits until the rank trains. If the process ends before that step, the
        next process of the rank also gets the order.
        """
        if not self._spec.allow_injection:
            return (
                f"job {self._spec.job_id} does not allow injections; start it with "
                "--allow-injection"
            )
        if not 0 <= order.rank < self._spec.world_size:
            return f"a world of {self._spec.world_size} ranks does not have a rank {order.rank}"
        rank = self._roster.ranks[order.rank]
        if not rank.inside:
            return f"rank {order.rank} is outside of the world now"
        if order.step is not None and order.step < rank.finished:
            return (
                f"step {order.step} is over, because rank {order.rank} has finished "
                f"{rank.finished} steps"
            )
        if order.kind is InjectionKind.HANG_COLLECTIVE and self._roster.world_size == 1:
            return "a world of one rank does not have collectives, so it cannot hang in one"
        if self._job.phase in ENDING:
            return "the job is ending"
        if rank.status is Status.TRAINING:
            self._job.do(Send(self._roster.nodes[rank.node].connection, order))
        elif order.step is None:
            return f"rank {order.rank} is not in a step, but {rank.status.value}"
        if order.step is not None:
            self.add(order, rank.pid if rank.status is Status.TRAINING else 0)
        return ""
