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


def test_healthy_nodes_train(checked: Callable[..., Job], baseline: Record, tmp_path: Path) -> None:
    run = checked()
    assert_recovered(run, baseline, replaced=set())
    assert set(healths(run).values()) == {Health.HEALTHY}
    measured = run.events_of(journal.NodeChecked)[0].verdict.seconds
    assert set(measured) == {Part.COMPUTE, Part.MEMORY, Part.LINK}
    assert run.incidents() == []
    assert not list(checkers("local-0", tmp_path))


def test_a_node_whose_checkers_are_killed_is_replaced(
    checked: Callable[..., Job], baseline: Record, tmp_path: Path
) -> None:
    """What the DLRover community does to show its check: something kills the check's processes."""
    with Killer("local-2", tmp_path) as killer:
        run = checked()
        run.wait_event(journal.Isolated, host="local-2")
    assert len(killer.victims) >= 2
    assert_recovered(run, baseline, replaced=set())
    assert healths(run)["local-2"] is Health.FAULTY
    (incident,) = run.incidents()
    assert incident.cause.kind is Kind.NODE
    assert "The node is down." in incident.cause.message
    assert "SIGKILL" in incident.cause.message
    hosts = {e.host for e in run.events_of(journal.NodeJoined)}
    assert "local-2" not in hosts
    assert len(hosts) == 4


@pytest.mark.parametrize("exclude", [True, False])
def test_a_slow_node(
    exclude: bool,
    checked: Callable[..., Job],
    baseline: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in slow("local-1", seconds=0.1).items():
        monkeypatch.setenv(name, value)
    run = checked(exclude=exclude)
    assert_recovered(run, baseline, replaced=set())
    assert healths(run)["local-1"] is Health.STRAGGLER
    hosts = {e.host for e in run.events_of(journal.NodeJoined)}
    assert ("local-1" in hosts) is not exclude
    said = [incident.cause.message for incident in run.incidents()]
    assert len(said) == exclude
    assert all("The node is a straggler and exits." in each for each in said)


def test_a_spare_takes_the_place_of_a_sick_node(
    checked: Callable[..., Job], baseline: Record, tmp_path: Path
) -> None:
    with Killer("local-0", tmp_path):
        run = checked(spares=1)
        run.wait_event(journal.Isolated, host="local-0")
    assert_recovered(run, baseline, replaced=set())
    assert len({e.host for e in run.events_of(journal.NodeJoined) if e.node >= 0}) == 4


def test_a_coordinator_that_dies_meanwhile(
    checked: Callable[..., Job], baseline: Record, tmp_path: Path
) -> None:
    """Another one begins the check anew."""
    run = checked()
    run.wait(lambda: any(checkers("local-3", tmp_path)), "a checker")
    run.kill_coordinator()
    run.revive_coordinator()
    assert_recovered(run, baseline, replaced=set())
    assert len(healths(run)) == 4
    assert not any(checkers("local-3", tmp_path))
