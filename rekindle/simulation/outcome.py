"""What is simulated, and what came of it."""

from __future__ import annotations

import enum
from collections import Counter

import msgspec

from rekindle.recovery.policy.policy import OUTER, Strategy


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A job's nodes. spares None: as many as it ever takes; least_nodes 0: all are needed."""

    nodes: int
    per_node: int
    spares: int | None = None
    least_nodes: int = 0
    engine: tuple[Strategy, ...] = OUTER

    @property
    def devices(self) -> int:
        """All devices that train."""
        return self.nodes * self.per_node


class Loss(str, enum.Enum):
    """Where the time goes that makes no progress."""

    RECOVERING = "recovering"  # from the fault until all train again
    REDONE = "work done again"
    CHECKPOINTS = "checkpoints"  # training halts while they are written
    OVERHEAD = "session and snapshots"
    NODES = "waiting for nodes"
    SMALLER = "a smaller world"
    PEOPLE = "waiting for people"


class Outcome(msgspec.Struct, kw_only=True):
    """One run: seconds, and the seconds of undisturbed training that it was worth.

    incidents: by the heaviest strategy of each. decisions: by strategy; an incident may take many.
    needed: for each fault that took nodes, how many were out then, those included; alone: the same
    without the faults of groups. to_store: how often training went on from a checkpoint. ended: how
    often a person had to begin the job again.
    """

    seconds: float
    work: float = 0.0
    lost: dict[Loss, float] = {}
    incidents: Counter[Strategy] = msgspec.field(default_factory=Counter)
    decisions: Counter[Strategy] = msgspec.field(default_factory=Counter)
    needed: list[int] = []
    alone: list[int] = []
    to_store: int = 0
    ended: int = 0

    @property
    def goodput(self) -> float:
        """The share of the time that was worth undisturbed training of the whole world."""
        return self.work / self.seconds
