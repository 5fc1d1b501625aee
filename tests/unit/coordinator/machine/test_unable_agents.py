"""Agents that report in their hello why they cannot work."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.job.spec import KeepsOff
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

REASON = "cannot read /store: permission denied"
TEXT = f"the agent on host-1 cannot work: {REASON}"


@pytest.mark.parametrize("settings", [{}, {"network_check": True}], ids=["", "node check"])
def test_a_job_that_never_began_fails_at_once(settings: dict[str, object]) -> None:
    job = Driver(nodes=2, **settings)
    job.hello(0, host="host-1", unable=REASON)
    assert job.outcome is False
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.LAUNCH
    assert job.last(journal.Ended).reason == TEXT
    assert job.sent(p.EndAgent)[0].message.status == 1


def test_the_agents_that_can_work_end_too() -> None:
    job = Driver(nodes=2)
    job.hello(0)
    job.hello(1, host="host-1", unable=REASON)
    assert job.sent_by_node(p.EndAgent)[0].status == 1
    assert job.last(journal.Ended).reason == TEXT


def test_a_job_that_trains_waits_for_another_agent() -> None:
    job = trained(5, nodes=2, processes=1)
    job.lose(1)
    job.hello(1, host="host-1", unable=REASON)
    assert job.phase is Phase.REGROUPING
    assert job.last(journal.NodeLeft).reason == TEXT
    job.hello(1)
    assert job.machine.job.roster.is_full


def test_the_reason_is_in_the_fault_if_no_other_agent_comes() -> None:
    job = trained(5, nodes=2, processes=1)
    job.lose(1)
    job.hello(1, host="host-1", unable=REASON)
    job.fire("node")
    fault = job.last(journal.FaultSeen).fault
    assert (fault.kind, fault.message.endswith(TEXT)) == (FaultKind.SCHEDULING, True)


def test_a_coordinator_that_takes_over_ends_no_job_for_it() -> None:
    job = trained(5, nodes=2, processes=1)
    job.lose_coordinator()
    job.hello(1, host="host-1", unable=REASON)
    assert job.phase is Phase.GATHERING
    assert job.machine.job.roster.obstacles == {1: TEXT}


def test_a_spare_is_left_out() -> None:
    job = Driver(nodes=1, spares=1)
    job.hello(-1, host="host-1", spare=True, unable=REASON)
    assert job.phase is Phase.GATHERING
    left = job.last(journal.NodeLeft)
    assert (left.node, left.reason) == (SPARE, TEXT)
    assert not job.machine.job.roster.spares


def test_an_agent_of_another_job_or_of_an_isolated_host_is_refused_for_that() -> None:
    job = Driver(nodes=1, keeps_off=KeepsOff.AT_ONCE)
    job.hello(0, unable=REASON, job_id="another")
    assert "job's is" in job.refusals()[0]
    job.machine.job.isolation.add(["host-1"], [])
    job.hello(-1, host="host-1", unable=REASON)
    assert job.refusals() == ["host host-1 is isolated"]
    assert job.phase is Phase.GATHERING
