"""Nodes are lost: an agent is killed, and by the kernel all its ranks with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

PAUSE_ALL = pause_all(12)


@pytest.mark.parametrize("node", soak_but([0, 1], 0))
def test_node_lost(node: int, job: Callable[..., Job], baseline: Record) -> None:
    """A lost node is replaced by a new one, and the ranks of the other node keep every step."""
    run = job(*PAUSE_ALL, nodes=2)
    run.wait_pause(12)
    run.kill_node(node)
    run.release_all()
    assert_recovered(run, baseline, replaced={2 * node, 2 * node + 1})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.strategy) == (Kind.NODE_LOST, Strategy.RECOVER)


@pytest.mark.parametrize("second", soak_but([0, 1], 1))
def test_node_lost_twice(second: int, job: Callable[..., Job], baseline: Record) -> None:
    """Two nodes lost one after the other, the same or each in turn, lose no step."""
    run = job(nodes=2)
    run.wait_step(0, 4)
    run.kill_node(1)
    run.wait_event(journal.FirstStep, generation=2)
    run.kill_node(second)
    assert_recovered(run, baseline, replaced={2, 3, 2 * second, 2 * second + 1})
    assert set(steps_lost(run)) == {0}


def test_node_and_rank_of_the_other_lost(job: Callable[..., Job], baseline: Record) -> None:
    """A node and a rank of the other node lost at once leave one replica: enough for every step."""
    run = job(*PAUSE_ALL, nodes=2)
    run.wait_pause(12)
    run.kill(3)
    run.kill_node(0)
    run.release_all()
    assert_recovered(run, baseline, replaced={0, 1, 3})
    assert steps_lost(run) == [0]


def test_node_and_all_other_ranks_lost(job: Callable[..., Job], baseline: Record) -> None:
    """With no live replica, the snapshot of the node that is left is used."""
    run = job(*PAUSE_ALL, nodes=2, snapshot_every=5)
    run.wait_pause(12)
    run.kill(2, 3)
    run.kill_node(0)
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [2]
    assert run.incidents()[0].sources == {"snapshot": 1, "peer": 3}


def test_new_node_lost_before_it_trains(job: Callable[..., Job], baseline: Record) -> None:
    """A new node that is lost again while its ranks take their state is replaced once more."""
    run = job(Fault(2, "receive", life=2, do="pause"), nodes=2)
    run.wait_step(0, 4)
    run.kill_node(1)
    run.wait_fault(0)
    run.kill_node(1)
    assert_recovered(run, baseline, replaced={2, 3})
    assert set(steps_lost(run)) == {0}


@pytest.mark.parametrize(("every", "lost"), soak_but([(5, 2), (0, 12)], (5, 2)))
def test_all_nodes_lost(every: int, lost: int, job: Callable[..., Job], baseline: Record) -> None:
    """With all nodes lost at once, training goes on from the newest checkpoint, else anew."""
    run = job(*PAUSE_ALL, nodes=2, checkpoint_every=every)
    run.wait_pause(12)
    if every:
        run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(0, 1)
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert max(steps_lost(run)) == lost


def test_no_node_comes(job: Callable[..., Job]) -> None:
    """A job for which no node comes in time fails, says why, and leaves nothing behind."""
    run = job(nodes=2, snapshot_every=0, policy=Policy(node_timeout_s=1.0), replaces=False)
    run.wait_step(0, 4)
    run.kill_node(1)
    ended = run.end()
    assert ended.outcome == "failed"
    assert ended.reason == "no node came as node 1 within 1 s"
    assert run.leftovers() == []
