"""What agent and coordinator say to each other about ranks that make no progress, and of switches.

A part of the protocol, see rekindle.protocol.agent.
"""

from __future__ import annotations

import msgspec

from rekindle.profiling.blocked_collectives import CollectivePosition
from rekindle.profiling.steps import StepTimes
from rekindle.profiling.switch import Switch
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.protocol.rank import Message
from rekindle.recovery.faults.tables.verdict import Severity


class Condition(msgspec.Struct, frozen=True):
    """A device. health: of the worst of its faults. codes: faults that it has now."""

    health: Severity
    codes: tuple[str, ...]


class RankStalled(Message, frozen=True, kw_only=True):
    """The rank is late with what it is at; said again every few seconds while it is.

    generation: the one that it is in. Whoever waits for others is late as they are.
    """

    rank: int
    generation: int


class ProfilingSwitchRead(Message, frozen=True, kw_only=True):
    """MindCluster's switch of light profiling, which an agent can read, says something new."""

    switch: Switch

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class StepTimings(Message, frozen=True, kw_only=True):
    """How long steps of the node's ranks took, by what they have written down. By rank."""

    steps: dict[int, tuple[StepTimes, ...]]

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        return tuple(self.steps)


class Conditions(Message, frozen=True, kw_only=True):
    """How devices of the node are now, by local number; of one that is left out nobody knows."""

    devices: dict[int, Condition]

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class InspectRanks(Message, frozen=True, kw_only=True):
    """Inspect all ranks of the node. The answer is RanksInspected with the same serial number."""

    serial: int


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent found when it looked closely at a rank.

    doing: since elapsed_s, as far as its agent saw. late: that is too long.
    waiting: for others, in a collective. operations: collectives begun so far in its generation;
    recent: marks of the newest, oldest first.
    stopped: by a signal. busy: its processes compute, or wait for a disk; outside of a step also:
    they read or write.
    where: its main thread, the innermost frames first; stack: all of it, as faulthandler writes it;
    left out for a rank that waits. Both are empty where there is no Python, or none that answers.
    standing: in collectives, by what it has written down, if it has.
    """

    rank: int
    finished: int
    doing: RankActivity
    elapsed_s: float
    late: bool
    waiting: bool = False
    operations: int = 0
    recent: tuple[int, ...] = ()
    stopped: bool = False
    busy: bool = False
    where: str = ""
    stack: str = ""
    standing: CollectivePosition | None = None


class RanksInspected(Message, frozen=True, kw_only=True):
    """What was found. error: why the node's ranks could not be looked at, if so."""

    serial: int
    looks: tuple[RankInspection, ...]
    error: str = ""

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        return tuple(look.rank for look in self.looks)
