"""The facts about a node that several parts of its agent read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rekindle.protocol.rank import Profile


@dataclass(slots=True)
class NodeState:
    """The facts about one node. node: its number; for a spare it is `names.SPARE`.

    generation: the newest generation that the node's ranks formed, or 0. formed_ns: the time of its
    formation, in nanoseconds since the epoch. restart: the newest restart whose ranks the
    agent started.

    profile: what the ranks record. processes: the number of ranks of a node. host: the file of the
    node's simulated host; None: the host is real.
    """

    processes: int
    host: Path | None = None
    node: int = 0
    generation: int = 0
    formed_ns: int = 0
    restart: int = 0
    profile: Profile = field(default_factory=Profile)

    @property
    def ranks(self) -> range:
        """The slots of the node's ranks."""
        return range(self.node * self.processes, (self.node + 1) * self.processes)
