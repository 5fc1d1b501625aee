"""Lost nodes: a kill of an agent, with which the kernel ends all its ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.acts import lose
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import NODE, patient, paused
from waiting import bound_s

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(400)  # the first test of a job waits for its end
STEPS = 40
WAITS_S = bound_s(2.0)  # limit for a node that does not join, and for the first nodes


def is_lost_node(_: Ended, incident: journal.Incident) -> None:
    """Check that the fault is the loss of the node, not a consequence of it."""
    assert incident.cause.kind is FaultKind.NODE_LOST


def loses_two_steps_at_most(ended: Ended, last: journal.Incident) -> None:
    """Check that the job loses the steps after the newest checkpoint."""
    lost = [each.steps_lost for each in ended.incidents if each.resumed_at == last.resumed_at]
    assert max(lost) == 2


def twice(step: int, first: int, second: int) -> Row:
    """Return the row of two nodes that are lost in succession, while others are in a step.

    A rank of another node pauses, and the lost node's ranks wait for its gradients.
    """
    elsewhere = [2 * (1 - node) for node in (first, second)]
    faults = (
        Fault(elsewhere[0], "forward", step, life=0, do="pause"),
        Fault(elsewhere[1], "forward", step + 2, life=0, do="pause"),
    )

    def act(job: Job, number: int) -> None:
        for each, node in enumerate((first, second), number):
            job.wait_fault(each)
            formed = job.events_of(journal.Formed)[-1]
            job.wait_event(journal.FirstStep, generation=formed.generation)
            job.kill_node(node)
            job.release(each)

    replaced = {2 * node + rank for node in (first, second) for rank in (0, 1)}
    name = f"node {first}, then node {second}"
    return Row(name, step, faults, act, strategies=NODE * 2, replaced=replaced)


def lost_again(step: int) -> Row:
    """Return the row of a new node that is lost while its ranks receive their state."""
    faults = (
        Fault(0, "forward", step, life=0, do="pause"),
        Fault(2, "receive", life=0, after=1, do="pause"),
    )

    def act(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.kill_node(1)
        job.release(number)
        job.wait_fault(number + 1)
        job.kill_node(1)

    return Row("new node lost at once", step, faults, act, strategies=None, replaced={2, 3})


def lose_all_but_memory(job: Job) -> None:
    """Kill a node and all ranks of the other one, whose agent has their snapshots."""
    job.kill(2, 3)
    job.kill_node(0)


ROWS = (
    paused("node 0", 7, lose(0), strategies=NODE, replaced={0, 1}, check=is_lost_node),
    twice(11, 1, 0),
    # One replica is left, which is enough for each step.
    paused("node and rank of the other", 17, lose(0, also=3), strategies=None, replaced={0, 1, 3}),
    lost_again(21),
    # There is no live replica; the ranks use the snapshot of the remaining node.
    paused(
        "node and all other ranks",
        27,
        lose_all_but_memory,
        strategies=None,
        lost=2,
        replaced=range(RANKS),
        sources=[{"snapshot": 1, "peer": 3}],
    ),
    paused(
        "all nodes",
        32,
        lose(0, 1, checkpoint=30),
        strategies=None,
        lost=None,
        replaced=range(RANKS),
        check=loses_two_steps_at_most,
    ),
)
SOAK = (
    paused("all nodes", 12, lose(0, 1), strategies=None, lost=None, replaced=range(RANKS)),
    paused("node 1", 16, lose(1), strategies=NODE, replaced={2, 3}, check=is_lost_node),
    twice(20, 1, 1),
)
# A node is lost without a replacement; the next attempt has the rows.
PLAN = Plan(
    "nodes",
    (
        Attempt(
            (paused("no node comes", 4, lose(1)),),
            {"snapshot_every": 0, "policy": patient(node_timeout_s=WAITS_S)},
            outcome="failed",
            replaces=False,
        ),
        Attempt(ROWS, {"snapshot_every": 5, "checkpoint_every": 10, "policy": patient()}),
    ),
    steps=STEPS,
    settings={"nodes": 2},
)
# There is no checkpoint.
SOAK_PLAN = Plan("soak", (Attempt(SOAK),), steps=STEPS, settings={"nodes": 2})


def test_no_node_comes(ended_of: EndedOf) -> None:
    """If no node joins in time, the job fails with that reason and leaves no process."""
    [end] = ended_of(PLAN).only(0).check_ends()
    assert end.reason == f"no agent joined for node 1 within {WAITS_S:g} s"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_lost(row: Row, ended_of: EndedOf) -> None:
    """A new node replaces a lost one; with a replica on another node no step is lost."""
    ended_of(PLAN).check(row)


def test_end(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    ended_of(PLAN).only(1).check_end(baseline_of("ddp", steps=STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("row", SOAK, ids=str)
def test_lost_in_the_soak(row: Row, ended_of: EndedOf) -> None:
    """The other node has the same results; without a checkpoint all steps are repeated."""
    incident = ended_of(SOAK_PLAN).check(row)
    if row.name == "all nodes":
        assert incident is not None
        assert (incident.resumed_at, incident.sources) == (0, {"fresh": RANKS})


@pytest.mark.soak
def test_end_of_the_soak(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    ended_of(SOAK_PLAN).check_end(baseline_of("ddp", steps=STEPS))
