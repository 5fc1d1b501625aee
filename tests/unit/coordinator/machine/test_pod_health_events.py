"""Health events of pods: why a node was lost, and why no pod replaces it."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import report, strategies, trained

from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy


def faults_seen(job: Driver) -> list[journal.FaultSeen]:
    return [event for event in job.history if isinstance(event, journal.FaultSeen)]


@pytest.mark.parametrize(
    ("what", "kind"),
    [("EvictionByEvictionAPI", FaultKind.EVICTION), ("OOMKilled", FaultKind.HOST_OOM)],
)
def test_a_sign_tells_why_a_node_was_lost(what: str, kind: FaultKind) -> None:
    """A pod reason that arrives after the loss of its node explains the incident.

    It causes no further decision.
    """
    job = trained(5, nodes=2)
    job.lose(1)
    assert faults_seen(job)[-1].fault.kind is FaultKind.NODE_LOST
    before = strategies(job)
    assert report(job, EventSource.POD_REASON, what, node=1) == ""
    newest = faults_seen(job)[-1]
    assert (newest.explained, newest.fault.kind) == (True, kind)
    assert what in newest.fault.message
    assert strategies(job) == before
    assert report(job, EventSource.POD_REASON, what, node=1) == ""  # a repeated report counts once
    assert len([e for e in faults_seen(job) if e.explained]) == 1


def test_another_pod_is_lost_for_the_same_reason() -> None:
    """If the new pod on the same host is lost for the same reason, the report is new."""
    job = trained(5, nodes=2)
    for round_ in (1, 2):
        address = job.machine.job.roster.nodes[1].address
        job.lose(1)
        for _ in ("once", "twice"):
            assert report(job, EventSource.POD_REASON, "Evicted", node=1, address=address) == ""
        assert (
            len([e for e in faults_seen(job) if e.explained and e.fault.kind is FaultKind.EVICTION])
            == round_
        )
        job.hello(1, address=f"10.9.9.{round_}")


def test_a_pod_is_lost_for_the_same_reason_once_more() -> None:
    """If a restarted container ends for the same reason, the report is new.

    The kubelet restarts the container in the same pod.
    """
    job = trained(5, nodes=2)
    address = job.machine.job.roster.nodes[1].address
    for run in (0, 1):
        job.lose(1)
        for _ in ("once", "twice"):
            fields = {"node": 1, "address": address, "run": run}
            assert report(job, EventSource.POD_REASON, "OOMKilled", **fields) == ""
        assert len([e for e in faults_seen(job) if e.explained]) == run + 1
        job.hello(1, address=address)


def test_a_late_reason_does_not_harm_the_pod_that_came() -> None:
    """A late reason of a lost pod is recorded and does not affect the pod that replaced it."""
    job = trained(5, nodes=2)
    before = job.machine.job.roster.nodes[1].address
    job.lose(1)
    job.hello(1, address="10.9.9.9")
    decided = strategies(job)
    assert report(job, EventSource.POD_REASON, "Evicted", node=1, address=before) == ""
    assert faults_seen(job)[-1].fault.kind is FaultKind.EVICTION
    assert strategies(job) == decided
    assert job.machine.job.roster.nodes[1].address == "10.9.9.9"


def test_a_sign_of_a_node_that_never_was() -> None:
    job = trained(5, nodes=2)
    job.lose(1)
    assert "does not have a node 2" in report(job, EventSource.POD_REASON, "OOMKilled", node=2)


def test_why_no_node_comes() -> None:
    """If no agent joins in time, the fault contains the reasons of the pods that wait."""
    job = trained(5, nodes=2)
    job.lose(1)
    assert report(job, EventSource.POD_REASON, "Unschedulable", node=1) == ""
    assert (
        report(job, EventSource.POD_REASON, "ImagePullBackOff", node=1) == ""
    )  # after its placement
    job.fire("node")
    message = job.last(journal.FaultSeen).fault.message
    assert message.startswith("no agent joined for node 1 within 600 s: ")
    assert "cannot pull its image" in message


def test_no_node_comes_at_the_very_beginning() -> None:
    job = Driver(nodes=2)
    assert report(job, EventSource.POD_REASON, "Unschedulable", node=1) == ""
    job.fire("node")
    assert "no node can accept it" in job.last(journal.Ended).reason


def test_a_description_that_cannot_work_is_not_waited_for() -> None:
    """If no pod can start from the description, the job does not wait: all pods share it."""
    job = trained(5, nodes=2)
    job.lose(1)
    assert report(job, EventSource.POD_REASON, "InvalidImageName", node=1) == ""
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.USER_CODE
    assert strategies(job)[-1] is not Strategy.RECOVER
