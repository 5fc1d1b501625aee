"""Describe the simulated world and the outcome of a run."""

from __future__ import annotations

import enum
from collections import Counter

import msgspec

from rekindle.recovery.policy.policy import OUTER, Strategy


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a job's nodes.

    `spares` None means that a spare is always ready. `least_nodes` 0 means that the job needs all
    nodes.
    """

    nodes: int
    per_node: int
    spares: int | None = None
    least_nodes: int = 0
    engine: tuple[Strategy, ...] = OUTER

    @property
    def devices(self) -> int:
        """Return the number of devices that train."""
        return self.nodes * self.per_node


class Loss(str, enum.Enum):
    """Name the causes of time without progress."""

    RECOVERING = "recovering"  # from the fault until all ranks train again
    REDONE = "work done again"
    CHECKPOINTS = "checkpoints"  # a checkpoint halts training
    OVERHEAD = "session and snapshots"
    NODES = "waiting for nodes"
    SMALLER = "a smaller world"
    PEOPLE = "waiting for people"


class Outcome(msgspec.Struct, kw_only=True):
    """Hold one run: its seconds, and the seconds of undisturbed training that it was worth.

    `incidents` counts the heaviest strategy of each incident. `decisions` counts all strategies; an
    incident may need several. `needed` holds, for each fault that removed nodes, the number of
    nodes under repair, including those nodes. `alone` holds the same without faults of groups.
    `to_store` counts how often training continued from a checkpoint. `ended` counts how often a
    person had to start the job again.
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
        """Return the share of time that was worth undisturbed training of the whole world."""
        return self.work / self.seconds
