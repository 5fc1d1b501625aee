"""A job with spares whose nodes move, on the state machine alone."""

from __future__ import annotations

from typing import Any

from jobs.driver import Driver
from rekindle.protocol import agent as p
from rekindle.protocol.http_views import Drain
from rekindle.recovery.faults.fault import Exit
from rekindle.recovery.journal import journal


class Moving(Driver):
    """A job that trains, with spares. `spare`: the newest spare's connection."""

    def __init__(
        self, *, nodes: int = 2, spares: int = 1, processes: int = 1, **settings: Any
    ) -> None:
        super().__init__(nodes=nodes, processes=processes, **settings)
        self.spare = -1
        self.train()
        for _ in range(spares):
            self.spare = self.hello(spare=True)

    def drain(self, node: int = 1, deadline_s: float = 0.0) -> str:
        order = Drain(node=node, by="test", deadline_s=deadline_s)
        refused = self.machine.moves.drain(order, self.now)
        self.collect()
        return refused

    def tell(self, message: p.Message) -> None:
        """Deliver a message of the spare."""
        received = p.decode_from_agent(p.encode(message))
        self.machine.on_message(self.spare, received, self.now)
        self.collect()

    def prepare(self, node: int = 1, **arrived: Any) -> None:
        """Let the spare start the ranks of the node, which arrive at their Session."""
        for rank in self.of(node):
            self.tell(p.Spawned(ranks=(p.LiveRank(rank=rank, pid=900 + rank),), generation=2))
        for rank in self.of(node):
            self.tell(p.Arrived(rank=rank, generation=0, **arrived))

    def of(self, node: int) -> list[int]:
        return [rank for rank in self.ranks if self.node_of(rank) == node]

    def pause(self, finished: int = 1) -> None:
        """Let the first rank pause, and all ranks leave their step."""
        self.leave(finished)
        self.arrive(self.ranks, finished)

    def take_place(self, node: int = 1, **arrived: Any) -> None:
        """Let the spare say hello as the node, with its live ranks."""
        self._checks.gone(self.of(node))
        live = tuple(p.LiveRank(rank=r, pid=900 + r, training=True) for r in self.of(node))
        self.hello_again(self.spare, node, spare=True, ranks=live, host="new")
        self.pids |= {rank: 900 + rank for rank in self.of(node)}
        for rank in self.of(node):
            self.arrive([rank], generation=0, state_generation=0, **arrived)

    def leave(self, finished: int = 1) -> None:
        """Let the first rank pause. The others are still in their step."""
        generation = self.machine.job.generation
        self.say(0, p.Paused(rank=0, generation=generation, finished=finished))

    def clear(self, node: int = 1) -> None:
        """Let the ranks that the spare has prepared end, as ordered."""
        for rank in self.of(node):
            self.tell(p.Exited(rank=rank, pid=900 + rank, exit=Exit(signal=9), finished=0))

    def promoted(self) -> list[tuple[int, int]]:
        """Return the spares that the last commands promote, with their nodes."""
        return [(each.connection, each.message.node) for each in self.sent(p.Promote)]

    def incident(self) -> journal.Incident:
        return journal.incidents(self.history)[-1]
