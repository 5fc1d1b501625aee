"""Name a flow run's state: the state of its job, derived from the journal. Pure.

All states except AwaitingApproval, which is a pause, are names of Prefect's state type RUNNING.
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
RECOVERING = "Recovering"  # failed ranks are replaced or repaired, others wait
RESTARTING = "Restarting"  # all ranks restart on their nodes
HUNG = "Hung"  # a hang, and its recovery without a reschedule
RESCHEDULING = "Rescheduling"  # the job, or a node's part of it, moves to new nodes
SHRUNK = "Shrunk"  # training continues without some nodes
AWAITING_APPROVAL = "AwaitingApproval"  # the job waits for a person's answer
STOPPING = "Stopping"  # the ranks end, and the agents write the final checkpoint

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


def shown(history: list[AnyEvent]) -> Shown:
    """Return the state of a job, from its journal so far."""
    attempt = attempts.newest(history)
    incident = _open(attempt)
    state = _of_incident(incident, attempt) if incident else None
    ends = [event for event in attempt if isinstance(event, Stopping)]
    if ends and ends[-1].outcome != RESCHEDULED:  # ranks also end for a reschedule
        return Shown(STOPPING, capital(ends[-1].reason))
    if state is not None:
        return state
    if not any(isinstance(event, FirstStep) for event in attempt):
        return _before_first_step(history[: len(history) - len(attempt)])
    return _of_world(attempt)


def _open(attempt: list[AnyEvent]) -> Incident | None:
    """Return the newest incident with a decision that is not closed, if there is one."""
    found = [i for i in journal.incidents(attempt) if i.strategies and not i.closed]
    return found[-1] if found else None


def _of_incident(incident: Incident, attempt: list[AnyEvent]) -> Shown:
    assert incident.strategy is not None
    description = f"Incident {incident.number}: {incident.strategy.value}: {incident.reason}"
    if journal.waits_for_approval(attempt) is not None:
        return Shown(AWAITING_APPROVAL, description)
    answers = [event for event in attempt if isinstance(event, Answered)]
    if answers and answers[-1].incident == incident.number and not answers[-1].granted:
        return Shown(STOPPING, f"{description}; not approved by {answers[-1].by}")
    name = STATES[incident.strategy]
    hung = incident.cause.kind is FaultKind.HANG and name in (RECOVERING, RESTARTING)
    return Shown(HUNG if hung else name, description)


def _before_first_step(earlier: list[AnyEvent]) -> Shown:
    """Return the state before the first step. A reschedule lasts until then."""
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
    return Shown(SHRUNK, f"Training continues without {nodes} until a new node joins")
