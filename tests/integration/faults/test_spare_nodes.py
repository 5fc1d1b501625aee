"""Nodes in reserve take the places of lost ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.job import LIMIT_S, Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.names import SPARE
from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy

PAUSE_ALL = pause_all(12)


def wait_spares(run: Job, count: int) -> None:
    """Wait until so many spares have come since the start."""
    run.wait_event(journal.NodeJoined, count, node=SPARE)


@pytest.mark.parametrize("node", soak_but([0, 1], 0))
def test_spare_takes_over(node: int, job: Callable[..., Job], baseline: Record) -> None:
    """The spare's agent becomes the node; no step is lost, and another spare is asked for."""
    run = job(*PAUSE_ALL, nodes=2, spares=1)
    run.wait_pause(12)
    wait_spares(run, 1)
    run.kill_node(node)
    run.release_all()
    assert_recovered(run, baseline, replaced={2 * node, 2 * node + 1})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.RECOVER
    assert "a spare takes its place" in incident.reason
    spare, *_ = run.events_of(journal.NodeJoined, node=SPARE)
    assert run.events_of(journal.NodeJoined, node=node)[-1].pid == spare.pid
    assert [event.node for event in run.events_of(journal.NodeWanted)] == [SPARE]


def test_new_spare_is_used_as_well(job: Callable[..., Job], baseline: Record) -> None:
    """The node is lost, then the spare in its place; the spare that came for that one goes on."""
    run = job(*PAUSE_ALL[:2], nodes=2, spares=1)
    wait_spares(run, 1)
    run.wait_step(0, 2)
    run.kill_node(1)
    run.wait_fault(0)  # those who stay wait here for the new spare
    run.wait_fault(1)
    wait_spares(run, 2)
    run.kill_node(1)
    run.release(0)
    run.release(1)
    assert_recovered(run, baseline, replaced={2, 3})
    assert set(steps_lost(run)) == {0}
    assert [event.node for event in run.events_of(journal.NodeWanted)] == [SPARE, SPARE]


@pytest.mark.parametrize(("every", "lost"), soak_but([(5, 2), (0, 12)], (5, 2)))
def test_all_nodes_lost(every: int, lost: int, job: Callable[..., Job], baseline: Record) -> None:
    """Spares know of checkpoints that were written while they waited."""
    run = job(*PAUSE_ALL, nodes=2, spares=2, checkpoint_every=every, replaces=False)
    run.wait_pause(12)
    wait_spares(run, 2)
    if every:
        run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(0, 1)
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert max(steps_lost(run)) == lost


def test_spare_is_lost(job: Callable[..., Job], baseline: Record) -> None:
    """The death of a spare disturbs nobody; another one comes, and takes over."""
    run = job(*PAUSE_ALL, nodes=2, spares=1)
    wait_spares(run, 1)
    run.kill_node(SPARE)
    wait_spares(run, 2)
    run.wait_pause(12)
    run.kill_node(0)
    run.release_all()
    assert_recovered(run, baseline, replaced={0, 1})
    (incident,) = run.incidents()
    assert "a spare takes its place" in incident.reason
    assert [event.left for event in run.events_of(journal.SpareLost)] == [0]


def test_spare_that_comes_too_late(job: Callable[..., Job]) -> None:
    """It finds in the journal that the job is over, and does not wait for a coordinator."""
    run = job(nodes=2)
    assert run.end().outcome == "succeeded", run.story()
    run.bring(SPARE)
    assert run.engine is not None
    assert run.engine.agents[-1].wait(LIMIT_S) == 1
    assert "the job has ended" in (run.directory.path / "agent-spare.log").read_text()
    assert run.leftovers() == []


def test_node_and_coordinator_lost(job: Callable[..., Job], baseline: Record) -> None:
    """Spares find the new coordinator as well, and take over when the node does not come back."""
    run = job(*PAUSE_ALL, nodes=2, spares=1, replaces=False)
    run.wait_pause(12)
    wait_spares(run, 1)
    run.kill_coordinator()
    run.kill_node(1)
    run.revive_coordinator()
    run.release_all()
    assert_recovered(run, baseline, replaced={2, 3})
    assert run.events_of(journal.NodeJoined, node=SPARE)[-1].pid == (
        run.events_of(journal.NodeJoined, node=1)[-1].pid
    )
