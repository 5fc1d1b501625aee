"""The name of a flow run's state, which follows from the journal alone."""

from __future__ import annotations

import pytest

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal.journal import (
    RESCHEDULED,
    Answered,
    AnyEvent,
    Decided,
    Ended,
    FaultSeen,
    FinalCheckpoint,
    FirstStep,
    Formed,
    JobStarted,
    Stopping,
)
from rekindle.recovery.policy.policy import Strategy
from rekindle.reporting.run_state import shown


def started(attempt: int = 1) -> AnyEvent:
    """Return the start of an attempt."""
    return JobStarted(job_id="j", attempt=attempt, nodes=2, processes_per_node=1, pid=1)


def formed(generation: int = 1, left_out: tuple[int, ...] = ()) -> AnyEvent:
    """Return the event of a generation that trains."""
    return Formed(
        generation=generation, world_size=2, step=0, sources={}, newest=0, left_out=left_out
    )


def broken(kind: FaultKind = FaultKind.PROCESS) -> Fault:
    return Fault(kind=kind, message="rank 1 is broken", rank=1)


def fault_seen(kind: FaultKind = FaultKind.PROCESS, incident: int = 1) -> AnyEvent:
    """Return the event of a fault."""
    return FaultSeen(incident=incident, fault=broken(kind))


def decided(strategy: Strategy, incident: int = 1, *, approval: bool = False) -> AnyEvent:
    """Return the decision about a fault."""
    return Decided(
        incident=incident, strategy=strategy, reason="because", fault=broken(), approval=approval
    )


def answered(granted: bool, incident: int = 1) -> AnyEvent:
    """Return the answer of a person."""
    return Answered(incident=incident, strategy=Strategy.RESTART, granted=granted, by="Ada")


def step(generation: int = 1, incident: int = 0) -> AnyEvent:
    """Return the first step of a generation, after which training continues."""
    return FirstStep(at=1.0, generation=generation, step=1, incident=incident)


TRAINS = [started(), formed(), step()]
PLACED_ANEW = decided(Strategy.RESCHEDULE_JOB)
ENDS_FOR_IT = Stopping(reason="because", outcome=RESCHEDULED)
ENDS = Ended(outcome=RESCHEDULED, reason="node 1 is sick", finished=3)


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([], "Running"),
        ([started()], "Running"),
        (TRAINS, "Running"),
        ([*TRAINS, fault_seen()], "Running"),  # the decision follows immediately
        ([*TRAINS, fault_seen(), decided(Strategy.RETRY)], "Recovering"),
        ([*TRAINS, fault_seen(), decided(Strategy.RECOVER_IN_PLACE)], "Recovering"),
        ([*TRAINS, fault_seen(), decided(Strategy.RECOVER)], "Recovering"),
        ([*TRAINS, fault_seen(), decided(Strategy.SHRINK)], "Recovering"),
        ([*TRAINS, fault_seen(), decided(Strategy.RESTART)], "Restarting"),
        ([*TRAINS, fault_seen(), decided(Strategy.RETRY), decided(Strategy.RESTART)], "Restarting"),
        ([*TRAINS, fault_seen(FaultKind.HANG), decided(Strategy.HANG_RESTART)], "Hung"),
        ([*TRAINS, fault_seen(FaultKind.HANG), decided(Strategy.RECOVER_IN_PLACE)], "Hung"),
        ([*TRAINS, fault_seen(FaultKind.HANG), decided(Strategy.RESCHEDULE_JOB)], "Rescheduling"),
        ([*TRAINS, fault_seen(), decided(Strategy.RESCHEDULE_POD)], "Rescheduling"),
        ([*TRAINS, fault_seen(), decided(Strategy.RETRY), step(2, incident=1)], "Running"),
        ([*TRAINS, formed(2, left_out=(1,)), step(2)], "Shrunk"),
        ([*TRAINS, formed(2, left_out=(1,)), step(2), formed(3), step(3)], "Running"),
        ([*TRAINS, Stopping(reason="enough")], "Stopping"),
        ([*TRAINS, Stopping(reason="enough"), FinalCheckpoint(node=0, step=3)], "Stopping"),
        ([*TRAINS, fault_seen(), decided(Strategy.RETRY), Stopping(reason="enough")], "Stopping"),
        ([*TRAINS, fault_seen(), decided(Strategy.FAIL)], "Stopping"),
        ([*TRAINS, fault_seen(), decided(Strategy.DUMP)], "Stopping"),
        ([*TRAINS, fault_seen(), PLACED_ANEW, ENDS_FOR_IT], "Rescheduling"),
        ([*TRAINS, fault_seen(), PLACED_ANEW, ENDS_FOR_IT, Stopping(reason="enough")], "Stopping"),
    ],
)
def test_every_phase_has_a_name(events: list[AnyEvent], name: str) -> None:
    """The state's name follows from the events of the journal."""
    assert shown(events).name == name


ASKED = [*TRAINS, fault_seen(), decided(Strategy.RESTART, approval=True)]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ([], "AwaitingApproval"),
        # This state stays until the answer.
        ([fault_seen(FaultKind.NODE_LOST)], "AwaitingApproval"),
        ([answered(True)], "Restarting"),
        ([answered(False)], "Stopping"),
        ([answered(True), step(2, incident=1)], "Running"),
        ([Stopping(reason="flow run was cancelled")], "Stopping"),
    ],
)
def test_what_waits_for_a_person_says_so(more: list[AnyEvent], name: str) -> None:
    """The state is AwaitingApproval until a person answers; then the answer decides the name."""
    assert shown([*ASKED, *more]).name == name


def test_a_job_that_is_placed_anew_says_so_until_it_trains() -> None:
    """The state is Rescheduling from the decision until the first step of the next attempt."""
    ends = [*TRAINS, fault_seen(), PLACED_ANEW, ENDS_FOR_IT, ENDS]
    assert shown(ends[:-1]).name == "Rescheduling"
    assert shown(ends).name == "Rescheduling"
    again = [*ends, started(2)]
    assert shown(again) == ("Rescheduling", "Attempt 2 begins: node 1 is sick")
    assert shown([*again, formed(), step()]).name == "Running"


def test_a_retry_by_a_person_is_no_rescheduling() -> None:
    """After a failed attempt, the state of a new attempt is the state of a first attempt."""
    failed = Ended(outcome="failed", reason="because", finished=3)
    assert shown([*TRAINS, failed, started(2)]).name == "Running"


def test_the_message_tells_what_is_done_and_why() -> None:
    """The message has the strategy and the reason, or the missing node of a smaller world."""
    assert shown(ASKED).message == "Incident 1: restart: because"
    refused = shown([*ASKED, answered(False)])
    assert refused.message == "Incident 1: restart: because; not approved by Ada"
    without = shown([*TRAINS, formed(2, left_out=(1,)), step(2)])
    assert without.message == "Training continues without node 1 until a new node joins"
