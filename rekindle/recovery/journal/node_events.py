"""Define the events of nodes and hosts for rekindle.recovery.journal.journal."""

from __future__ import annotations

from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal.event import Event


class NodeJoined(Event, frozen=True, kw_only=True, tag="node-joined"):
    """Record that the job admitted an agent; node -1: as a spare. `host` is the machine's name."""

    node: int
    address: str
    pid: int
    host: str = ""


class NodeWanted(Event, frozen=True, kw_only=True, tag="node-wanted"):
    """Record a request to the engine for an agent of this node rank; -1: a spare."""

    node: int


class NodeLeft(Event, frozen=True, kw_only=True, tag="node-left"):
    """Record the departure of an agent that the world does not need.

    Its ranks had not started, or the world continues without them. `reason` is why the job rejected
    the agent, if it did. `replaced` means that an agent on another host replaces it.
    """

    node: int
    address: str
    pid: int
    reason: str = ""
    replaced: bool = False


class SpareLost(Event, frozen=True, kw_only=True, tag="spare-lost"):
    """Record the loss of a spare agent; `left` is the number of remaining spares."""

    address: str
    pid: int
    left: int


class MoveRequested(Event, frozen=True, kw_only=True, tag="move-requested"):
    """Record that a node is to move to another agent, in an incident of its own.

    `fault` has the kind `planned`, the node, its host, and the reason. `by` is the person or
    monitor that requested it. `deadline` is the time at which the node may end; 0: none. `address`
    and `pid` are those of the agent that the job leaves.
    """

    incident: int
    fault: Fault
    by: str
    address: str
    pid: int
    deadline: float = 0.0


class MoveLate(Event, frozen=True, kw_only=True, tag="move-late"):
    """Record that the deadline of a move has passed; the ranks write a checkpoint."""

    incident: int
    node: int


class Moved(Event, frozen=True, kw_only=True, tag="moved"):
    """Record that another agent has taken the place of a node that was to move.

    `began` is the time at which training paused for it; 0: ranks waited for another reason.
    `address` and `pid` are those of the agent that the job left.
    """

    incident: int
    node: int
    host: str
    began: float
    address: str
    pid: int


class MoveEnded(Event, frozen=True, kw_only=True, tag="move-ended"):
    """Record that the job gave a move up; the node keeps its agent."""

    incident: int
    node: int
    reason: str


MoveEvent = MoveRequested | MoveLate | Moved | MoveEnded


def move_in_words(event: MoveEvent) -> str:
    """Return the event in one line."""
    match event:
        case MoveRequested():
            until = f", within {event.deadline - event.fault.at:.0f} s" if event.deadline else ""
            text = f"{event.fault.message} (requested by {event.by}{until})"
        case MoveLate():
            text = f"node {event.node} has not moved in time, so the ranks write a checkpoint"
        case Moved():
            where = f" on {event.host}" if event.host else ""
            text = f"planned: another agent{where} has taken the place of node {event.node}"
        case MoveEnded():
            text = f"node {event.node} does not move: {event.reason}"
    return f"incident {event.incident}: {text}"


class Isolated(Event, frozen=True, kw_only=True, tag="isolated"):
    """Record a request to the engine to isolate this host.

    `incident` 0 means that no rank was affected.
    """

    incident: int
    node: int
    host: str
    reason: str


class ResetSkipped(Event, frozen=True, kw_only=True, tag="reset-skipped"):
    """Record that a rank has started without the reset of its device, which was not possible."""

    incident: int
    rank: int
    reason: str

    def in_words(self) -> str:
        """Return the event in one line."""
        return (
            f"incident {self.incident}: rank {self.rank} starts without a reset of its device, "
            f"because {self.reason}"
        )


class HealthEventSeen(Event, frozen=True, kw_only=True, tag="health-event"):
    """Record a health event; `urgency` and `explanation` are from the tables."""

    health_event: HealthEvent
    host: str
    urgency: Urgency
    explanation: str
