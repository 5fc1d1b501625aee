"""Nodes move to prepared spares while they work. One job moves many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_jobs.ended import Ended, EndedOf
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import NODE, RETRY, paused

from rekindle.names import SPARE
from rekindle.protocol.http_views import Drain
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(400)  # the first test of a job waits for its end
STEPS = 40
LATER = "the spare of the move has replaced another node, so the move waits for the next spare"


def drain(job: Job, *nodes: int) -> None:
    """Order the moves of these nodes, and wait until their new ranks wait for a pause."""
    for node in nodes:
        job.client().drain(Drain(node=node, by="test"))
    wait_ready(job, *nodes)


def wait_ready(job: Job, *nodes: int) -> None:
    """Wait until the new ranks of these nodes wait for a pause."""

    def ready() -> bool:
        return {move.node for move in job.status().moves if move.ready} >= set(nodes)

    job.wait(ready, f"the new ranks of nodes {nodes}")


def drained(*nodes: int) -> Callable[[Job], None]:
    """Return an act that drains these nodes, each with a spare of its own."""

    def act(job: Job) -> None:
        for _ in nodes[1:]:
            job.bring(SPARE)
        drain(job, *nodes)

    return act


def drain_and_lose(node: int, lost: int) -> Callable[[Job], None]:
    """Return an act that drains a node, and then kills it or its spare."""

    def act(job: Job) -> None:
        drain(job, node)
        job.kill_node(lost)
        if lost == SPARE:
            job.wait_event(journal.SpareLost)  # the next spare may be ready soon after it
            wait_ready(job, node)

    return act


def drain_and_lose_coordinator(job: Job) -> None:
    """Drain node 1, and replace the coordinator."""
    drain(job, 1)
    job.kill_coordinator()
    job.revive_coordinator()


def is_planned(ended: Ended, incident: journal.Incident) -> None:
    """Check that the incident is a planned move without a decision."""
    assert incident.planned
    assert incident.strategies == []
    assert incident.sources == {"self": 2, "peer": 2}


PLANNED: dict[str, Any] = {
    "strategies": None,
    "cause": (FaultKind.PLANNED, -1),
    "check": is_planned,
}
ROWS = (
    paused("node 1", 5, drained(1), replaced={2, 3}, **PLANNED),
    paused("node 0, which hosts the store", 9, drained(0), replaced={0, 1}, **PLANNED),
    paused("another node is lost", 13, drain_and_lose(1, 0), strategies=NODE, replaced=None),
    paused(LATER, 17, lambda job: wait_ready(job, 1), strategies=(), replaced={2, 3}),
    paused("both nodes", 21, drained(0, 1), replaced={0, 1, 2, 3}, **PLANNED),
    paused("its spare is lost", 26, drain_and_lose(1, SPARE), **(PLANNED | {"replaced": None})),
    paused("it is lost", 30, drain_and_lose(1, 1), strategies=NODE, replaced=None),
    paused("coordinator", 34, drain_and_lose_coordinator, strategies=RETRY, replaced=None),
)
PLAN = Plan("moves", (Attempt(ROWS),), steps=STEPS, settings={"nodes": 2, "spares": 1})


@pytest.fixture(scope="module")
def ended(ended_of: EndedOf) -> Ended:
    """Return the job after all rows."""
    return ended_of(PLAN)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_node_moves(row: Row, ended: Ended) -> None:
    """A spare takes the place of a node; no step is lost, and no budget is used up."""
    ended.check(row)
    planned = [each for each in ended.incidents_of(row) if each.planned]
    assert len(planned) == {"both nodes": 2, LATER: 0}.get(row.name, 1)
    assert [each.steps_lost for each in planned] == [0] * len(planned)
    assert all(ended.is_closed(each) for each in planned)


def test_the_hook_of_the_script(ended: Ended) -> None:
    """Each rank learns of each recovery; a new process learns of the one that it belongs to."""
    kept, new = ended.job.stderr(0), ended.job.stderr(2)
    for text, after in ((kept, "after"), (kept, "before"), (new, "after")):
        assert f"recovery: {after} planned - ranks 2,3" in text
    assert "recovery: before planned - ranks 0,1" in new
    assert "recovery: after node-lost recover ranks 2,3" in kept
    assert "recovery: before coordinator-lost" in kept


def test_end(ended: Ended, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit; no process is left."""
    ended.check_end(baseline_of("ddp", steps=STEPS))
    assert len(ended.of(journal.Moved)) == 8
