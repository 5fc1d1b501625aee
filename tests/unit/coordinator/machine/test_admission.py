"""A healthy checked node joins the job. A faulty node does not, and the job requests another."""

from __future__ import annotations

import msgspec
import pytest
from jobs.driver import Driver

from rekindle.coordinator.machine.job_state import Phase
from rekindle.job.spec import KeepsOff
from rekindle.names import SPARE, WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.host_history import HostChecked, HostIsolated, learned_from
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict

FAULTY = NodeVerdict(node=1, health=Health.FAULTY, reason="it died", part=Measurement.COMPUTE)
SLOW = NodeVerdict(node=1, health=Health.STRAGGLER, reason="it is slow", part=Measurement.COMPUTE)
UNKNOWN = NodeVerdict(node=1, health=Health.UNKNOWN, reason="who knows", part=Measurement.LINK)
HEALTHY = NodeVerdict(node=0, health=Health.HEALTHY, seconds={Measurement.COMPUTE: 0.5})


def checked_job(*, exclude: bool = False, **world: object) -> Driver:
    settings = {"network_check": True, "exclude_straggler": exclude, **world}
    job = Driver(nodes=2, processes=1, keeps_off=KeepsOff.AT_ONCE, **settings)
    return job


def admit(job: Driver, connection: int, verdict: NodeVerdict, **fields: object) -> p.Hello:
    hello = p.Hello(
        **{
            "job_id": job.machine.job.spec.job_id,
            "attempt": 0,
            "version": WIRE_VERSION,
            "node": -1,
            "address": f"10.0.0.{connection}",
            "pid": connection,
            "processes": 1,
            "host": f"host-{connection}",
        }
        | fields
    )
    assert job.machine.admission.is_to_be_checked(connection, hello)
    job.machine.admission.on_checked(connection, hello, verdict, job.now)
    job._note_seats()
    job.collect()
    return hello


def test_healthy_nodes_are_taken_in() -> None:
    job = checked_job()
    admit(job, 100, HEALTHY)
    admit(job, 101, HEALTHY)
    assert job.machine.job.roster.is_full
    assert [e.fault for e in job.recorded(journal.NodeChecked)] == [None, None]
    assert journal.incidents(job.history) == []


@pytest.mark.parametrize(
    ("verdict", "exclude", "kind", "text"),
    [
        (FAULTY, False, FaultKind.NODE, "The node is down. host-101: it died"),
        (
            SLOW,
            True,
            FaultKind.STRAGGLER,
            "The node is a straggler and exits. host-101: it is slow",
        ),
    ],
)
def test_a_sick_node_is_sent_away_and_another_asked_for(
    verdict: NodeVerdict, exclude: bool, kind: FaultKind, text: str
) -> None:
    job = checked_job(exclude=exclude)
    admit(job, 100, HEALTHY)
    admit(job, 101, verdict)
    assert job.refusals() == [text]
    assert job.last(journal.Isolated).host == "host-101"
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [1]
    (incident,) = journal.incidents(job.history)
    assert (incident.cause.kind, incident.cause.host, incident.closed) == (kind, "host-101", True)
    admit(job, 102, HEALTHY)
    assert job.last(journal.NodeJoined).host == "host-102"
    job.train(1)
    assert job.phase is Phase.TRAINING
    assert len(journal.incidents(job.history)) == 1


@pytest.mark.parametrize("verdict", [SLOW, UNKNOWN])
def test_what_is_slow_or_unknown_comes_in_unless_told_otherwise(verdict: NodeVerdict) -> None:
    job = checked_job()
    admit(job, 100, HEALTHY)
    admit(job, 101, verdict)
    assert job.machine.job.roster.is_full
    assert not job.recorded(journal.Isolated)


def test_a_spare_takes_the_place() -> None:
    job = checked_job(spares=1)
    admit(job, 100, HEALTHY)
    admit(job, 101, HEALTHY)
    admit(job, 102, HEALTHY)
    assert len(job.machine.job.roster.spares) == 1
    admit(job, 103, FAULTY)
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [SPARE]


def test_a_spare_that_comes_first_is_promoted_into_a_sick_ones_place() -> None:
    job = checked_job(spares=1)
    admit(job, 100, HEALTHY)
    admit(job, 102, HEALTHY, spare=True)
    admit(job, 101, FAULTY)
    assert job.promotions
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [SPARE]


def test_two_sick_nodes_ask_for_two_others() -> None:
    job = checked_job()
    admit(job, 100, FAULTY)
    admit(job, 101, FAULTY)
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [0, 1]


def test_an_agent_of_the_sick_host_is_refused_when_it_comes_again() -> None:
    job = checked_job()
    admit(job, 100, HEALTHY)
    hello = admit(job, 101, FAULTY)
    assert not job.machine.admission.is_to_be_checked(105, hello)
    job.machine.admission.on_hello(105, hello)
    job.collect()
    assert job.refusals() == ["host host-101 is isolated"]


def test_another_coordinator_knows_the_host_of_a_refused_agent() -> None:
    """A new coordinator keeps the host isolated. The agent was no node, so no node leaves it."""
    job = checked_job()
    hello = admit(job, 101, FAULTY)
    job.lose_coordinator()
    assert not job.machine.admission.is_to_be_checked(105, hello)
    assert not job.machine.job.isolation._leaving


def test_whoever_was_taken_in_or_brings_ranks_is_not_checked() -> None:
    job = checked_job()
    hello = admit(job, 100, HEALTHY)
    assert not job.machine.admission.is_to_be_checked(100, hello)
    brings = msgspec.structs.replace(hello, ranks=(p.LiveRank(rank=1, pid=7),))
    assert not job.machine.admission.is_to_be_checked(101, brings)
    other = msgspec.structs.replace(hello, version=WIRE_VERSION + 1)
    assert not job.machine.admission.is_to_be_checked(101, other)


def test_a_job_that_trains_is_not_disturbed_by_a_sick_newcomer() -> None:
    job = checked_job(spares=1)
    admit(job, 100, HEALTHY)
    admit(job, 101, HEALTHY)
    job.train(3)
    admit(job, 102, FAULTY)
    assert job.phase is Phase.TRAINING
    assert [e.node for e in job.recorded(journal.NodeWanted)] == [SPARE]
    (incident,) = journal.incidents(job.history)
    assert incident.closed


def test_what_was_measured_is_known_of_the_host() -> None:
    job = checked_job()
    admit(job, 100, HEALTHY)
    admit(job, 101, FAULTY)
    learned = [learned_from("job", event) for event in job.history]
    checks = [each for each in learned if isinstance(each, HostChecked)]
    assert [(each.host, each.health) for each in checks] == [
        ("host-100", Health.HEALTHY),
        ("host-101", Health.FAULTY),
    ]
    assert checks[0].seconds == {Measurement.COMPUTE: 0.5}
    assert [each.host for each in learned if isinstance(each, HostIsolated)] == ["host-101"]
