"""Define the events of nodes and hosts for rekindle.recovery.journal.journal."""

from __future__ import annotations

from rekindle.recovery.faults.classification import HealthEvent
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


class Isolated(Event, frozen=True, kw_only=True, tag="isolated"):
    """Record a request to the engine to isolate this host.

    `incident` 0 means that no rank was affected.
    """

    incident: int
    node: int
    host: str
    reason: str


class HealthEventSeen(Event, frozen=True, kw_only=True, tag="health-event"):
    """Record a health event; `urgency` and `explanation` are from the tables."""

    health_event: HealthEvent
    host: str
    urgency: Urgency
    explanation: str
