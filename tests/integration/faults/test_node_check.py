"""Node checks before the training, with real processes that are killed, disconnected or slow.

One job has two attempts. In each attempt one host is slow, and the checkers of another are killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from checked.trouble import checkers, slow
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record
from waiting import wait_until

from rekindle import names
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import Measurement, NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health
from rekindle.training.node_check.serving import NAME

# Nodes of one machine wait for each other, and other processes use the two cores.
LIMITS = NodeCheckLimits(compute_factor=5.0, link_factor=5.0)
NODES = 4
SLOW, KILLED, SPARE = "local-1", "local-2", "local-4"
PACE_S = 0.03  # between two reads of all processes; a check takes much longer
FAILS = 12  # the step in which an error of the script ends the first attempt


Events = Sequence[journal.AnyEvent]
E = TypeVar("E", bound=journal.Event)


def of(kind: type[E], events: Events) -> list[E]:
    """Return the events of a kind."""
    return [event for event in events if isinstance(event, kind)]


def healths(events: Events) -> dict[str, Health]:
    """Return the verdict on each host."""
    return {event.host: event.verdict.health for event in of(journal.NodeChecked, events)}


def hosts(events: Events) -> set[str]:
    """Return the hosts whose nodes train."""
    return {event.host for event in of(journal.NodeJoined, events) if event.node >= 0}


def assert_killed(incident: journal.Incident) -> None:
    """Check that the incident belongs to a node whose checkers were killed."""
    assert incident.cause.kind is FaultKind.NODE
    assert "The node is down." in incident.cause.message
    assert "SIGKILL" in incident.cause.message


def any_checker() -> bool:
    """Return whether a checker of any job exists; a read of all processes' names is cheap."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has just ended
            if process.name.isdigit() and (process / "comm").read_text() == f"{NAME}\n":
                return True
    return False


def checkers_of(run: Job, host: str) -> list[psutil.Process]:
    """Return the processes that check a host of the job."""
    return [*checkers(host, run.folder)] if any_checker() else []


def kill_checkers(run: Job, host: str) -> set[int]:
    """Kill each new checker of a host until this attempt isolates the host."""
    victims: set[int] = set()
    before = len(run.events_of(journal.Isolated, host=host))

    def isolated() -> bool:
        for process in checkers_of(run, host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                victims.add(process.pid)
        return len(run.events_of(journal.Isolated, host=host)) > before

    wait_until(isolated, f"the isolation of {host}", pause_s=PACE_S)
    return victims


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Return the job; only this job knows its hosts, and products are slower on one of them."""
    folder = tmp_path_factory.mktemp("checked")
    environment = slow(SLOW, seconds=0.1) | {names.ENV_HOME: str(folder / "home")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run = Job(folder, Fault(0, "forward", FAILS, do="raise"), nodes=NODES, hosts=True)
        yield run
        run.__exit__()


@pytest.fixture(scope="module")
def first(job: Job) -> Events:
    """Return the events of the first attempt, which has a spare and no other replacement.

    The test kills the coordinator during the check. It kills the checkers of a host in the check of
    the next coordinator. The attempt ends with an error of the script.
    """
    job.replaces = False
    job.start(network_check=True, node_check=LIMITS, spares=1)
    wait_until(lambda: checkers_of(job, "local-3"), "a checker", pause_s=PACE_S)
    job.kill_coordinator()
    job.revive_coordinator()
    kill_checkers(job, KILLED)
    assert job.end().outcome == "failed", job.story()
    left = [each for number in range(NODES + 1) for each in checkers_of(job, f"local-{number}")]
    assert not left
    assert job.leftovers() == []
    return job.events()


@pytest.fixture(scope="module")
def second(job: Job, first: Events) -> Events:
    """Return the events of the second attempt, which has no spare and excludes stragglers."""
    job.replaces = True
    job.start(exclude_straggler=True, spares=0)
    # The DLRover community demonstrates its check in this way.
    assert len(kill_checkers(job, KILLED)) >= 2
    assert job.end().outcome == "succeeded", job.story()
    assert job.leftovers() == []
    return job.events()[len(first) :]


def test_healthy_nodes_train(first: Events) -> None:
    """After a kill of the coordinator during the check, the next one repeats the check.

    The healthy nodes train without an incident.
    """
    found = healths(first)
    assert found.keys() == {f"local-{number}" for number in range(NODES + 1)}
    healthy = found.keys() - {SLOW, KILLED}
    assert {found[host] for host in healthy} == {Health.HEALTHY}
    checked = [each for each in of(journal.NodeChecked, first) if each.host in healthy]
    assert set(checked[0].verdict.seconds) == {
        Measurement.COMPUTE,
        Measurement.MEMORY,
        Measurement.LINK,
    }
    assert healthy < hosts(first)
    # No incident is about a healthy node; the last one is the script's.
    *incidents, last = journal.incidents(first)
    assert [incident.cause.host for incident in incidents] == [KILLED]
    assert "injected into step" in last.cause.message


def test_a_spare_takes_the_place_of_a_sick_node(first: Events) -> None:
    """A spare replaces the faulty node; the job does not exclude stragglers, and one stays."""
    assert healths(first)[KILLED] is Health.FAULTY
    assert healths(first)[SLOW] is Health.STRAGGLER
    incident = journal.incidents(first)[0]
    assert_killed(incident)
    assert incident.closed
    assert hosts(first) == {"local-0", SLOW, "local-3", SPARE}


def test_sick_nodes_are_replaced(second: Events) -> None:
    """Other nodes replace the faulty node and the straggler."""
    assert healths(second)[KILLED] is Health.FAULTY
    assert healths(second)[SLOW] is Health.STRAGGLER
    incidents = {incident.cause.host: incident for incident in journal.incidents(second)}
    assert incidents.keys() == {KILLED, SLOW}
    assert_killed(incidents[KILLED])
    assert "The node is a straggler and exits." in incidents[SLOW].cause.message
    assert all(incident.closed for incident in incidents.values())
    assert not {KILLED, SLOW} & hosts(second)
    assert len(hosts(second)) == NODES


def test_end(second: Events, job: Job, baseline: Record) -> None:
    """The training equals that of an undisturbed job, with one process per rank and attempt."""
    assert_same_training(job.record, baseline)
    assert_samples_once(job.record)
    for rank in range(job.record.ranks):
        assert len(job.record.lives(rank)) == 2, f"rank {rank} was started anew"
        assert job.record.result(rank)["pid"] == job.record.lives(rank)[-1]
