"""Requests for approval: a coordinator that takes over finds them complete in the journal."""

from __future__ import annotations

from rekindle.coordinator.machine.inheritance import inheritance
from rekindle.coordinator.machine.job_state import Incidents
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import Decided, FaultSeen, JobStarted
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import Situation
from rekindle.recovery.policy.policy import Policy, Strategy


def test_a_lighter_strategy_that_needs_approval_is_told() -> None:
    """A lighter strategy that needs approval is shown to users, even after a heavier decision.

    Otherwise, a person could not answer the request.
    """
    policy = Policy(max_restarts=1, approve=(Strategy.RETRY,))
    incidents = Incidents(0)
    wrong = Fault(
        kind=FaultKind.USER_CODE, message="rank 0 raised ValueError", rank=0, signature="x"
    )
    broken = Fault(kind=FaultKind.LINK, message="a link broke", rank=1)
    for fault, expected in ((wrong, Strategy.RESTART), (broken, Strategy.RETRY)):
        incidents.note(fault)
        situation = Situation(fault=fault, session=True, formed=True, newest=0, incident=1)
        decision = decide(policy, situation)
        decided = incidents.decided(situation, decision)
        assert (decision.strategy, decided.strategy) == (expected, expected)
    assert (decided.approval, decided.outweighed) == (True, False)


def test_a_coordinator_that_takes_over_isolates_what_is_approved() -> None:
    """The decision that waits for approval is the same after it is read from the journal."""
    fault = Fault(kind=FaultKind.NODE, message="node 1 is sick", node=1, host="b")
    decided = Decided(
        incident=1,
        strategy=Strategy.RESCHEDULE_JOB_ISOLATED,
        reason="node 1 is sick",
        fault=fault,
        isolate=True,
        approval=True,
    )
    events: list[journal.Event] = [
        JobStarted(job_id="j", attempt=1, nodes=2, processes_per_node=1, pid=1),
        FaultSeen(incident=1, fault=fault),
        decided,
    ]
    found = inheritance([journal.decode(journal.encode(event)) for event in events], 1)
    assert found is not None
    assert found.awaiting is not None
    waits_for, decision = found.awaiting
    assert waits_for == fault
    assert (decision.isolate, decision.approval) == (True, True)
