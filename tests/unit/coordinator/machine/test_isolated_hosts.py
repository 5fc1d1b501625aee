"""A node that leaves an isolated host: its replacement must not start on the same host."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import report, strategies, trained

from rekindle.job.spec import KeepsOff
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

RECOVERS = Policy(strategies=(Strategy.RECOVER,))
MOVES_JOBS = Policy(
    strategies=(Strategy.RECOVER, Strategy.RESCHEDULE_POD, Strategy.RESCHEDULE_JOB_ISOLATED),
    max_pod_reschedules=1,
    max_reschedules=1,
)


def broken(keeps_off: KeepsOff, policy: Policy = RECOVERS, **world: object) -> tuple[Driver, str]:
    """Return a job of two nodes and the host of node 1, whose device fell off the bus."""
    job = trained(5, nodes=2, keeps_off=keeps_off, policy=policy, **world)
    host = job.machine.job.roster.nodes[1].host
    assert report(job, EventSource.XID, "79", node=1, device=0) == ""
    return job, host


def left(keeps_off: KeepsOff) -> tuple[Driver, str]:
    """Return the same job and host after the agent of node 1 has ended."""
    job, host = broken(keeps_off)
    job.end(1)
    return job, host


def refused(job: Driver) -> list[str]:
    return job.refusals()


def test_it_ends_with_a_status_that_has_another_one_come() -> None:
    job, host = broken(KeepsOff.AT_ONCE)
    assert strategies(job) == [Strategy.RECOVER]
    assert [each.message.status for each in job.sent(p.EndAgent)] == [1]
    assert job.last(journal.Isolated).host == host
    left = job.last(journal.NodeLeft)
    assert (left.node, left.replaced) == (1, True)
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [1]


def test_an_agent_of_an_isolated_host_is_refused() -> None:
    """An isolated host's agent is refused as a node and as a spare. Another host's agent joins."""
    job, host = left(KeepsOff.AT_ONCE)
    for spare in (False, True):
        job.hello(-1, host=host, spare=spare)
        assert refused(job) == [f"host {host} is isolated"]
    assert job.machine.job.roster.missing == [1]
    job.hello(-1, host="another")
    assert job.last(journal.NodeJoined).node == 1


def test_another_coordinator_refuses_it_too() -> None:
    job, host = left(KeepsOff.AT_ONCE)
    job.lose_coordinator()
    job.hello(-1, host=host)
    assert refused(job) == [f"host {host} is isolated"]


def test_an_agent_that_is_a_node_may_go_on_where_it_is() -> None:
    """Another node of an isolated host may reconnect, because the fault was not its own."""
    job, host = broken(KeepsOff.AT_ONCE)
    job.lose(0)
    job.hello(0, host=host)
    assert refused(job) == []


def test_a_machine_of_its_own_is_all_there_is() -> None:
    job, host = left(KeepsOff.NEVER)
    job.hello(-1, host=host)
    assert refused(job) == []
    assert job.last(journal.NodeJoined).node == 1


def test_no_more_is_waited_for_than_two_of_them() -> None:
    """After two agents from the isolated host, the job stops waiting for a node.

    The first may be the old agent. The second shows that the scheduler uses the host again.
    """
    job, host = broken(KeepsOff.RESTARTS)
    assert strategies(job) == [Strategy.RECOVER]  # the policy has no other strategy
    job.hello(-1, host=host)
    assert job.timers["node"] > 0
    job.hello(-1, host=host)
    assert job.timers["node"] == 0
    job.fire("node")
    fault = job.last(journal.FaultSeen).fault
    assert fault.kind is FaultKind.SCHEDULING
    assert fault.message.startswith("no agent joined for node 1: ")
    assert host in fault.message


def test_one_that_comes_from_elsewhere_in_between() -> None:
    """An agent from another host resets the count: the job again waits for two refusals."""
    job, host = left(KeepsOff.RESTARTS)
    job.hello(-1, host=host)
    job.hello(-1, host="another")
    job.lose(1)
    job.hello(-1, host=host)
    assert job.timers["node"] > 0


def test_where_it_can_be_kept_off_more_are_refused() -> None:
    """If the scheduler can exclude a host, each refusal requests the node again.

    Five refusals show that it does not exclude the host.
    """
    job, host = broken(KeepsOff.AT_ONCE)
    for _ in range(4):
        job.hello(-1, host=host)
    assert job.timers["node"] > 0
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [1] * 5
    job.hello(-1, host=host)
    assert job.timers["node"] == 0


def test_one_that_was_lost_for_another_reason_is_waited_for() -> None:
    """Refused pods of an isolated host do not end the wait for a node that was lost otherwise."""
    job = trained(5, nodes=2, keeps_off=KeepsOff.RESTARTS, policy=RECOVERS, spares=1)
    job.hello(-1, spare=True, host="another")
    host = job.machine.job.roster.nodes[1].host
    report(job, EventSource.XID, "79", node=1, device=0)
    job.hello(-1, host=host)  # before the spare has arrived
    job.hello(-1, host=host)
    assert job.recorded(journal.NodeWanted)[-1].node == SPARE
    job.hello(1, host="another")
    job.lose(0)
    for _ in range(3):
        job.hello(-1, host=host)
    assert job.timers["node"] > 0
    assert host not in "".join(job.machine.job.roster.obstacles.values())


def test_two_hosts_that_are_left() -> None:
    """With two isolated hosts, one refusal of each does not end the wait."""
    job = trained(5, nodes=3, keeps_off=KeepsOff.RESTARTS, policy=RECOVERS)
    hosts = [job.machine.job.roster.nodes[node].host for node in (1, 2)]
    for node in (1, 2):
        report(job, EventSource.XID, "79", node=node, device=0)
    for host in hosts:
        job.hello(-1, host=host)
    assert job.timers["node"] > 0
    job.hello(-1, host=hosts[0])
    assert job.timers["node"] == 0


def test_another_coordinator_knows_who_was_to_leave() -> None:
    job, host = broken(KeepsOff.RESTARTS)
    job.end(1)
    job.lose_coordinator()
    job.hello(0)
    for _ in range(2):
        assert job.timers["node"] > 0
        job.hello(-1, host=host)
    assert job.timers["node"] == 0


def test_a_spare_that_waits_there_is_no_help() -> None:
    """A spare on the isolated host also leaves, and the job requests replacements."""
    job = trained(5, nodes=2, keeps_off=KeepsOff.AT_ONCE, policy=RECOVERS, spares=2)
    host = job.machine.job.roster.nodes[1].host
    sick = job.hello(-1, spare=True, host=host)
    job.hello(-1, spare=True, host="another")
    report(job, EventSource.XID, "79", node=1, device=0)
    assert [each.message.status for each in job.sent(p.EndAgent)] == [1, 1]
    assert sick in job.machine.job.sent_home
    assert job.last(journal.SpareLost).left == 1
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [SPARE, SPARE]
    job.hello(1, host="another")
    assert job.machine.job.roster.nodes[1].host == "another"


def test_spares_on_a_machine_of_ones_own_stay() -> None:
    job = trained(5, nodes=2, keeps_off=KeepsOff.NEVER, policy=RECOVERS, spares=1)
    job.hello(-1, spare=True, host=job.machine.job.roster.nodes[1].host)
    report(job, EventSource.XID, "79", node=1, device=0)
    assert job.recorded(journal.SpareLost) == []


@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_pod_reschedules=2),
        Policy(strategies=(Strategy.RECOVER, Strategy.RESCHEDULE_JOB), max_reschedules=2),
        Policy(strategies=(Strategy.RECOVER, Strategy.RESTART), max_restarts=3),
    ],
)
def test_what_would_stay_on_the_host_is_not_better(policy: Policy) -> None:
    """A new node may start on another host, so the job takes no costlier strategy.

    A costlier strategy may also place it on the same host.
    """
    job, host = broken(KeepsOff.RESTARTS, policy)
    assert strategies(job) == [Strategy.RECOVER]
    assert job.last(journal.Isolated).host == host


@pytest.mark.parametrize(
    ("keeps_off", "spares", "wanted"),
    [
        (KeepsOff.AT_ONCE, 0, Strategy.RECOVER),
        (KeepsOff.RESTARTS, 1, Strategy.RECOVER),  # the spare is on another host
        (KeepsOff.RESTARTS, 0, Strategy.RESCHEDULE_JOB_ISOLATED),
    ],
)
def test_the_whole_job_is_placed_anew_only_where_it_has_to_be(
    keeps_off: KeepsOff, spares: int, wanted: Strategy
) -> None:
    job = trained(5, nodes=2, keeps_off=keeps_off, policy=MOVES_JOBS, spares=spares)
    for _ in range(spares):
        job.hello(-1, spare=True)
    report(job, EventSource.XID, "79", node=1, device=0)
    assert strategies(job) == [wanted]


def test_the_reason_is_told() -> None:
    job, _ = broken(KeepsOff.RESTARTS, MOVES_JOBS)
    assert "a new node may start on the same host" in job.last(journal.Decided).reason


def test_a_lost_node_needs_no_other_host() -> None:
    """A lost node may return on the same host, because the host is not known to be faulty."""
    job = trained(5, nodes=2, keeps_off=KeepsOff.RESTARTS, policy=MOVES_JOBS)
    host = job.machine.job.roster.nodes[1].host
    job.lose(1)
    assert strategies(job) == [Strategy.RECOVER]
    job.hello(-1, host=host)
    assert refused(job) == []
