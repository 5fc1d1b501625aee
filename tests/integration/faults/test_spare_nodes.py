"""Spare nodes replace lost ones. One job loses many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import lose
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import LIMIT_S, Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import NODE, paused
from waiting import bound_s

from rekindle.names import SPARE
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(400)  # the first test of a job waits for its end
STEPS = 40


def joined(job: Job, node: int = SPARE) -> list[int]:
    """Return the processes of all agents that have joined as this node since the start."""
    return [event.pid for event in job.events_of(journal.NodeJoined, node=node)]


def wait_spares(job: Job, count: int) -> None:
    """Wait until the job has had this number of spares since its start."""
    job.wait_event(journal.NodeJoined, count, node=SPARE)


def lose_spare(job: Job) -> None:
    """Kill the spare, and wait for another one."""
    wait_spares(job, 1)
    job.kill_node(SPARE)
    wait_spares(job, 2)


def lose_first(job: Job) -> tuple[int, list[int]]:
    """Kill node 0; return the remaining spare, and the agents of node 0 before."""
    job.kill_node(0)
    return joined(job)[-1], joined(job, 0)


def lose_both_in_turn(job: Job, number: int) -> None:
    """Kill node 1, and then the spare that replaces it, before the spare has trained."""
    job.wait_fault(number)
    wait_spares(job, 3)
    job.kill_node(1)
    for each in (0, 1):
        job.release(number + each)
    for each in (2, 3):  # the other ranks wait here for the new spare
        job.wait_fault(number + each)
    wait_spares(job, 4)
    job.kill_node(1)
    for each in (2, 3):
        job.release(number + each)


def lose_with_coordinator(job: Job) -> None:
    """Kill the coordinator and node 1, for which the engine starts no node."""
    wait_spares(job, 5)
    job.replaces = False
    job.kill_coordinator()
    job.kill_node(1)
    job.revive_coordinator()


def bring_spares(job: Job) -> None:
    """Start two spares, and wait for them."""
    count = len(joined(job))
    for _ in range(2):
        job.bring(SPARE)
    wait_spares(job, count + 2)


def takes_the_place(ended: Ended, incident: journal.Incident) -> None:
    """Check that the agent of the spare is now node 0."""
    assert "a spare replaces it" in incident.reason
    spare, before = ended.seen["node 0"]
    assert joined(ended.job, 0)[len(before)] == spare


def is_node_1(ended: Ended, _: journal.Incident) -> None:
    """Check that node 1 was a spare, which has found the new coordinator."""
    assert joined(ended.job, 1)[-1] in joined(ended.job)


def come_too_late(job: Job) -> int:
    """Start a spare after the job's end, and return its exit status."""
    job.bring(SPARE)
    assert job.engine is not None
    return job.engine.agents[-1].wait(bound_s(LIMIT_S))


def pauses(step: int) -> list[Fault]:
    """Return the pauses of node 0's ranks."""
    return [Fault(rank, "forward", step, life=0, do="pause") for rank in (0, 1)]


NODE_0 = paused("node 0", 9, lose_first, strategies=NODE, replaced={0, 1}, check=takes_the_place)
AND_ITS_SPARE = Row(
    "node 1 and the spare in its place",
    13,
    (*pauses(13), *pauses(15)),
    lose_both_in_turn,
    strategies=None,
    replaced={2, 3},
)
ALL: dict[str, Any] = {"strategies": None, "lost": None, "replaced": range(RANKS)}
ROWS = (
    paused("spare", 5, lose_spare, strategies=()),
    NODE_0,
    AND_ITS_SPARE,
    paused(
        "node and coordinator",
        21,
        lose_with_coordinator,
        strategies=None,
        replaced={2, 3},
        check=is_node_1,
    ),
    paused("two spares come", 25, bring_spares, strategies=()),
    # Spares know the checkpoints that were written during their wait.
    paused("all nodes", 32, lose(0, 1, checkpoint=30), **ALL),
)
PLAN = Plan(
    "spares",
    (Attempt(ROWS, name="too late", after=come_too_late),),
    steps=STEPS,
    settings={"nodes": 2, "spares": 1, "checkpoint_every": 10},
)


@pytest.fixture(scope="module")
def ended(ended_of: EndedOf) -> Ended:
    """Return the job after all rows."""
    return ended_of(PLAN)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_lost(row: Row, ended: Ended) -> None:
    """A spare replaces a lost node; with a replica on another node no step is lost."""
    incident = ended.check(row)
    if row.name == "all nodes":
        assert incident is not None
        assert (incident.resumed_at, incident.sources["checkpoint"] > 0) == (30, True)


@pytest.mark.parametrize(("row", "count"), [(NODE_0, 1), (AND_ITS_SPARE, 2)], ids=str)
def test_another_spare_is_asked_for(row: Row, count: int, ended: Ended) -> None:
    """After a spare has replaced a node, the coordinator requests another spare."""
    assert [event.node for event in ended.of(journal.NodeWanted, row)] == [SPARE] * count


def test_spare_is_lost(ended: Ended) -> None:
    """The loss of a spare disturbs no rank; another one joins."""
    assert [event.left for event in ended.of(journal.SpareLost)] == [0]


def test_spare_that_comes_too_late(ended: Ended) -> None:
    """A spare that starts after the job's end reads that in the journal and ends."""
    assert ended.after["too late"] == 1
    assert "the job has ended" in (ended.job.directory.path / "agent-spare.log").read_text()


def test_end(ended: Ended, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    ended.check_end(baseline_of("ddp", steps=STEPS))


# ---- in the soak

SOAK = (
    paused("two spares", 8, lambda job: wait_spares(job, 2), strategies=()),
    paused("all nodes", 12, lose(0, 1), **ALL),
    paused("node 1", 16, lose(1), strategies=NODE, replaced={2, 3}),
)
SOAK_PLAN = Plan("soak", (Attempt(SOAK),), steps=STEPS, settings={"nodes": 2, "spares": 2})


@pytest.mark.soak
def test_the_other_node(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """Without a checkpoint the spares start the training from step 0."""
    ended = ended_of(SOAK_PLAN)
    for row in SOAK[1:]:
        incident = ended.check(row)
        assert incident is not None
        assert (incident.resumed_at == 0) == (row.name == "all nodes")
    ended.check_end(baseline_of("ddp", steps=STEPS))
