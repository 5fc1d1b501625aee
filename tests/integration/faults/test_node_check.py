"""Nodes are checked before they train: real processes that are killed, cut off or made slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checked.trouble import Killer, checkers, slow
from training_jobs.checks import assert_recovered
from training_jobs.job import Job
from training_jobs.record import Record

from rekindle import names
from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.node_check.evidence import Limits, Part
from rekindle.recovery.node_check.verdicts import Health

# Nodes of one machine wait for each other, and two cores are never quiet.
LIMITS = Limits(compute_factor=5.0, link_factor=5.0)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job whose nodes are checked; hosts are known to this test alone."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    jobs: list[Job] = []

    def begin(*, exclude: bool = False, limits: Limits = LIMITS, **world: object) -> Job:
        jobs.append(Job(tmp_path, nodes=4, hosts=True, **world))
        return jobs[-1].start(network_check=True, exclude_straggler=exclude, node_check=limits)

    yield begin
    for each in jobs:
        each.__exit__()


def healths(run: Job) -> dict[str, Health]:
    return {e.host: e.verdict.health for e in run.events_of(journal.NodeChecked)}


def hosts(run: Job) -> set[str]:
    """Return the hosts whose nodes train."""
    return {e.host for e in run.events_of(journal.NodeJoined) if e.node >= 0}


def make_slow(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slow(host, seconds=0.1).items():
        monkeypatch.setenv(name, value)


def assert_killed(incident: journal.Incident) -> None:
    """The incident of a node whose checkers were killed."""
    assert incident.cause.kind is Kind.NODE
    assert "The node is down." in incident.cause.message
    assert "SIGKILL" in incident.cause.message


def test_healthy_nodes_train(checked: Callable[..., Job], baseline: Record, tmp_path: Path) -> None:
    """A coordinator dies during the check: another one begins the check again."""
    run = checked()
    run.wait(lambda: any(checkers("local-3", tmp_path)), "a checker")
    run.kill_coordinator()
    run.revive_coordinator()
    assert_recovered(run, baseline, replaced=set())
    assert len(healths(run)) == 4
    assert set(healths(run).values()) == {Health.HEALTHY}
    measured = run.events_of(journal.NodeChecked)[0].verdict.seconds
    assert set(measured) == {Part.COMPUTE, Part.MEMORY, Part.LINK}
    assert run.incidents() == []
    assert not [each for number in range(4) for each in checkers(f"local-{number}", tmp_path)]


def test_sick_nodes_are_replaced(
    checked: Callable[..., Job],
    baseline: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkers of one node are killed, as the DLRover community shows its check; one is slow.

    A slow node exits, for the job excludes stragglers. Other nodes train.
    """
    make_slow("local-1", monkeypatch)
    with Killer("local-2", tmp_path) as killer:
        run = checked(exclude=True)
        run.wait_event(journal.Isolated, host="local-2")
    assert len(killer.victims) >= 2
    assert_recovered(run, baseline, replaced=set())
    assert healths(run)["local-2"] is Health.FAULTY
    assert healths(run)["local-1"] is Health.STRAGGLER
    incidents = {incident.cause.host: incident for incident in run.incidents()}
    assert incidents.keys() == {"local-1", "local-2"}
    assert_killed(incidents["local-2"])
    assert "The node is a straggler and exits." in incidents["local-1"].cause.message
    assert not {"local-1", "local-2"} & hosts(run)
    assert len(hosts(run)) == 4


def test_a_spare_takes_the_place_of_a_sick_node(
    checked: Callable[..., Job],
    baseline: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow node stays, for the job does not exclude stragglers."""
    make_slow("local-1", monkeypatch)
    with Killer("local-0", tmp_path):
        run = checked(spares=1)
        run.wait_event(journal.Isolated, host="local-0")
    assert_recovered(run, baseline, replaced=set())
    assert healths(run)["local-1"] is Health.STRAGGLER
    (incident,) = run.incidents()
    assert_killed(incident)
    assert "local-1" in hosts(run)
    assert len(hosts(run)) == 4
