"""The messages of agent and coordinator about devices, profiling and ranks without progress.

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
    """A device. health: the severity of its worst fault. codes: its present faults."""

    health: Severity
    codes: tuple[str, ...]


class RankStalled(Message, frozen=True, kw_only=True):
    """The rank's activity takes too long. The agent repeats this every few seconds.

    generation: that of the rank. A rank that waits for others is late as well. stopped: a signal
    has stopped the process of the rank, which may be in any activity.
    """

    rank: int
    generation: int
    stopped: bool = False


class ProfilingSwitchRead(Message, frozen=True, kw_only=True):
    """MindCluster's switch of light profiling has changed; an agent can read it."""

    switch: Switch

    lasting = True


class StepTimings(Message, frozen=True, kw_only=True):
    """The durations of steps, from the profiling records of the node's ranks. By rank."""

    steps: dict[int, tuple[StepTimes, ...]]

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks about which the sender reports."""
        return tuple(self.steps)


class Conditions(Message, frozen=True, kw_only=True):
    """The present condition of the node's devices, by local number; a missing one is unknown."""

    devices: dict[int, Condition]

    lasting = True


class InspectRanks(Message, frozen=True, kw_only=True):
    """Inspect all ranks of the node. The answer is RanksInspected with the same serial number."""

    serial: int


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's close inspection of a rank.

    doing: the activity. elapsed_s: its duration, as observed by the agent. limit_s: the duration
    from which the agent calls the rank late.

    waiting: the rank waits for others in a collective. operations: the number of collectives that
    it has started in its generation. recent: the marks of the newest ones, oldest first.

    stopped: by a signal. busy: its processes compute or wait for a disk. Outside of a step they are
    also busy if they read or write, or wake often.

    where: the innermost frames of the main thread, in one line. stack: the whole stack of the main
    thread, as faulthandler writes it. It is empty for a rank that waits. Both are empty if the
    process does not run Python, or if it does not answer.

    position: that in its collectives, from its own records, if it has any.
    """

    rank: int
    finished: int
    doing: RankActivity
    elapsed_s: float
    limit_s: float
    waiting: bool = False
    operations: int = 0
    recent: tuple[int, ...] = ()
    stopped: bool = False
    busy: bool = False
    where: str = ""
    stack: str = ""
    position: CollectivePosition | None = None

    @property
    def late(self) -> bool:
        """Return whether the activity lasts too long."""
        return self.elapsed_s >= self.limit_s


class RanksInspected(Message, frozen=True, kw_only=True):
    """The result of the inspection. error: why the agent could not inspect the node's ranks."""

    serial: int
    looks: tuple[RankInspection, ...]
    error: str = ""

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks about which the sender reports."""
        return tuple(result.rank for result in self.looks)
