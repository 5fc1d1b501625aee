"""What a flow run's state is called: where its job is, folded from the journal. Pure.

All but AwaitingApproval, which is a pause, are names of Prefect's state type RUNNING.
"""

from __future__ import annotations

from typing import NamedTuple

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.journal.journal import (
    RESCHEDULED,
    Answered,
    AnyEvent,
    FirstStep,
    Formed,
    Incident,
    Stopping,
)
from rekindle.recovery.policy.policy import INNER, OUTER, Strategy
from rekindle.reporting.event_text import capital
from rekindle.words import listed

RUNNING = "Running"
RECOVERING = "Recovering"  # broken ranks are replaced or repaired, all others wait with their state
RESTARTING = "Restarting"  # all ranks are started anew where they are
HUNG = "Hung"  # no progress; whatever is done about it short of placing the job anew
RESCHEDULING = "Rescheduling"  # the job, or a node's part of it, is placed anew
SHRUNK = "Shrunk"  # training goes on without some nodes
AWAITING_APPROVAL = "AwaitingApproval"  # nothing is done before a person has answered
STOPPING = "Stopping"  # the ranks end, and the final checkpoint is written

STATES = {
    **dict.fromkeys(INNER, RECOVERING),
    **dict.fromkeys(OUTER, RESCHEDULING),
    Strategy.RESTART: RESTARTING,
    Strategy.HANG_RESTART: HUNG,
    Strategy.DUMP: STOPPING,
    Strategy.FAIL: STOPPING,
}


class Shown(NamedTuple):
    """A state's name, and what it says to people."""

    name: str
    message: str = ""


def shown(history: list[AnyEvent]) -> Shown:
    """Say where the job is, by its journal so far."""
    attempt = attempts.newest(history)
    incident = _open(attempt)
    said = _of_incident(incident, attempt) if incident else None
    ends = [event for event in attempt if isinstance(event, Stopping)]
    if ends and ends[-1].outcome != RESCHEDULED:  # for which the ranks are told to end, too
        return Shown(STOPPING, capital(ends[-1].reason))
    if said is not None:
        return said
    if not any(isinstance(event, FirstStep) for event in attempt):
        return _before_first_step(history[: len(history) - len(attempt)])
    return _of_world(attempt)


def _open(attempt: list[AnyEvent]) -> Incident | None:
    """Return the incident that was decided about and is not over, if there is one."""
    found = [i for i in journal.incidents(attempt) if i.strategies and not i.closed]
    return found[-1] if found else None


def _of_incident(incident: Incident, attempt: list[AnyEvent]) -> Shown:
    assert incident.strategy is not None
    said = f"Incident {incident.number}: {incident.strategy.value}: {incident.reason}"
    if journal.waits_for_approval(attempt) is not None:
        return Shown(AWAITING_APPROVAL, said)
    answers = [event for event in attempt if isinstance(event, Answered)]
    if answers and answers[-1].incident == incident.number and not answers[-1].granted:
        return Shown(STOPPING, f"{said}; not approved by {answers[-1].by}")
    name = STATES[incident.strategy]
    hung = incident.cause.kind is FaultKind.HANG and name in (RECOVERING, RESTARTING)
    return Shown(HUNG if hung else name, said)


def _before_first_step(earlier: list[AnyEvent]) -> Shown:
    """An attempt that the one before has asked for is not over with before it trains."""
    end = attempts.end_of(earlier)
    if end is None or end.outcome != RESCHEDULED:
        return Shown(RUNNING)
    return Shown(RESCHEDULING, f"Attempt {attempts.number(earlier) + 1} begins: {end.reason}")


def _of_world(attempt: list[AnyEvent]) -> Shown:
    formed = [event for event in attempt if isinstance(event, Formed)]
    left_out = formed[-1].left_out if formed else ()
    if not left_out:
        return Shown(RUNNING)
    nodes = listed("node", left_out)
    return Shown(SHRUNK, f"Training goes on without {nodes}, until one comes in its place")
