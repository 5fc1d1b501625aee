"""Name a flow run's state: the state of its job, derived from the journal. Pure.

All states except AwaitingApproval, which is a pause, are names of Prefect's state type RUNNING.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal.attempts import ApprovalFold
from rekindle.recovery.journal.journal import (
    RESCHEDULED,
    Answered,
    AnyEvent,
    Ended,
    FirstStep,
    Formed,
    Incident,
    IncidentFold,
    JobStarted,
    Stopping,
)
from rekindle.recovery.policy.policy import INNER, OUTER, Strategy
from rekindle.reporting.event_text import capital
from rekindle.words import listed

RUNNING = "Running"
WAITING = "Waiting"  # a check before the launch gets no answer from a store or a cluster
RECOVERING = "Recovering"  # failed ranks are replaced or repaired, others wait
RESTARTING = "Restarting"  # all ranks restart on their nodes
HUNG = "Hung"  # a hang, and its recovery without a reschedule
RESCHEDULING = "Rescheduling"  # the job, or a node's part of it, moves to new nodes
SHRUNK = "Shrunk"  # training continues without some nodes
AWAITING_DEVICES = "AwaitingDevices"  # another job has a device that the job needs
AWAITING_APPROVAL = "AwaitingApproval"  # the job waits for a person's answer
STOPPING = "Stopping"  # the ranks end, and the agents write the final checkpoint

WITHOUT_CHECKPOINT = "CompletedWithoutCheckpoint"  # of type COMPLETED: training has finished

STATES = {
    **dict.fromkeys(INNER, RECOVERING),
    **dict.fromkeys(OUTER, RESCHEDULING),
    Strategy.RESTART: RESTARTING,
    Strategy.HANG_RESTART: HUNG,
    Strategy.DUMP: STOPPING,
    Strategy.FAIL: STOPPING,
}


class Shown(NamedTuple):
    """A state's name, and its message for users."""

    name: str
    message: str = ""


def shown(history: Iterable[AnyEvent]) -> Shown:
    """Return the state of a job, from its journal so far."""
    fold = StateFold()
    for event in history:
        fold.add(event)
    return fold.shown()


class StateFold:
    """Fold the state of a job. The cost of an event does not grow with their number."""

    def __init__(self) -> None:
        self._attempt = 0
        self._earlier: Ended | None = None  # the end of the attempt before the newest
        self._end: Ended | None = None
        self._begin()

    def _begin(self) -> None:
        self._incidents = IncidentFold()
        self._open: dict[int, Incident] = {}  # with a decision, and not closed
        self._approval = ApprovalFold()
        self._answer: Answered | None = None
        self._stopping: Stopping | None = None
        self._stepped = False
        self._left_out: tuple[int, ...] = ()

    def add(self, event: AnyEvent) -> None:
        """Add the next event."""
        self._follow(event)
        self._approval.add(event)
        incident = self._incidents.add(event)
        if incident is None:
            return
        if incident.strategies and not incident.closed:
            self._open[incident.number] = incident
        else:
            self._open.pop(incident.number, None)

    def _follow(self, event: AnyEvent) -> None:
        match event:
            case JobStarted():
                self._earlier, self._end = self._end, None
                self._attempt = max(self._attempt, event.attempt)
                self._begin()
            case Ended():
                self._end = event
            case Answered():
                self._answer = event
            case Stopping():
                self._stopping = event
            case FirstStep():
                self._stepped = True
            case Formed():
                self._left_out = event.left_out

    def shown(self) -> Shown:
        """Return the state after the events so far."""
        stopping = self._stopping
        if stopping is not None and stopping.outcome != RESCHEDULED:  # ranks also end for that
            return Shown(STOPPING, capital(stopping.reason))
        if self._open:
            return self._of_incident(self._open[max(self._open)])
        if not self._stepped:
            return self._before_first_step()
        if not self._left_out:
            return Shown(RUNNING)
        nodes = listed("node", self._left_out)
        return Shown(SHRUNK, f"Training continues without {nodes} until a new node joins")

    def _of_incident(self, incident: Incident) -> Shown:
        assert incident.strategy is not None
        description = f"Incident {incident.number}: {incident.strategy.value}: {incident.reason}"
        if self._approval.open is not None:
            return Shown(AWAITING_APPROVAL, description)
        answer = self._answer
        if answer is not None and answer.incident == incident.number and not answer.granted:
            return Shown(STOPPING, f"{description}; not approved by {answer.by}")
        name = STATES[incident.strategy]
        hung = incident.cause.kind is FaultKind.HANG and name in (RECOVERING, RESTARTING)
        return Shown(HUNG if hung else name, description)

    def _before_first_step(self) -> Shown:
        """Return the state before the first step. A reschedule lasts until then."""
        end = self._earlier
        if end is None or end.outcome != RESCHEDULED:
            return Shown(RUNNING)
        return Shown(RESCHEDULING, f"Attempt {self._attempt} begins: {end.reason}")
