"""Find the attempts in a journal, and the state of the newest: folds over its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rekindle import names
from rekindle.recovery.journal.journal import (
    Answered,
    AnyEvent,
    Decided,
    Ended,
    Event,
    JobStarted,
    NodeJoined,
    NodeWanted,
    SpareLost,
    Stopping,
)

E = TypeVar("E", bound=Event)


def newest(history: Iterable[E]) -> list[E]:
    """Return the part of the history that belongs to the newest attempt."""
    part: list[E] = []
    for event in history:
        if isinstance(event, JobStarted):
            part = []
        part.append(event)
    return part


def number(history: Iterable[AnyEvent], none: int = 0) -> int:
    """Return the number of the newest attempt, or `none` without one."""
    return max((event.attempt for event in history if isinstance(event, JobStarted)), default=none)


def end_of(history: Iterable[AnyEvent]) -> Ended | None:
    """Return how the newest attempt ended; None: it has not, or its coordinator failed."""
    ends = [event for event in newest(history) if isinstance(event, Ended)]
    return ends[-1] if ends else None


def is_stopping(history: Iterable[AnyEvent]) -> bool:
    """Return whether the newest attempt has received an order to end."""
    return any(isinstance(event, Stopping) for event in newest(history))


def nodes_missing(history: Iterable[AnyEvent]) -> list[int]:
    """Return the nodes of the newest attempt without an agent, and SPARE for each missing spare."""
    missing: set[int] = set()
    # number of spares; waiting spares by the process of their agent
    wanted, waiting = 0, set[int]()
    for event in newest(history):
        match event:
            case JobStarted():
                missing, wanted = set(range(event.nodes)), event.spares
            case NodeJoined(node=names.SPARE):
                waiting.add(event.pid)
            case SpareLost():
                waiting.discard(event.pid)
            case NodeWanted() if event.node != names.SPARE:
                missing.add(event.node)
            case NodeJoined():
                missing.discard(event.node)
                waiting.discard(event.pid)
    return [*sorted(missing), *[names.SPARE] * (wanted - len(waiting))]


def under_way(events: Iterable[Event]) -> int | None:
    """Return the attempt that has started and not ended, or None."""
    own = newest(events)
    over = any(isinstance(event, Ended) for event in own)
    return None if over else next((e.attempt for e in own if isinstance(e, JobStarted)), None)


class ApprovalFold:
    """Fold the decision that waits for a person's approval. open: this decision, or None."""

    def __init__(self) -> None:
        self.open: Decided | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, Decided):
            self.open = event if event.approval else None
        elif isinstance(event, Answered | Stopping | Ended):
            self.open = None


def waits_for_approval(events: Iterable[Event]) -> Decided | None:
    """Return the decision that still waits for a person's approval, or None."""
    fold = ApprovalFold()
    for event in events:
        fold.add(event)
    return fold.open
