"""Replicas of snapshots on another node: any one node can be lost without replicas of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import lose, lose_and_end
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.memory import COPIES, buffers, damage_snapshots
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import paused

from rekindle.names import SPARE
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(400)  # the first test of a job waits for its end
STEPS = 80
FROM_REPLICA = {"replica": 2, "snapshot": 2}


def plan(name: str, *attempts: Attempt, nodes: int = 2, **settings: int) -> Plan:
    """Return a job without replicas of shards."""
    settings = {"nodes": nodes, "snapshot_every": 5} | settings
    return Plan(name, attempts, variant="sharded", steps=STEPS, settings=settings)


def lose_damaged(step: int, checkpoint: int = 0) -> Callable[[Job], int]:
    """Return an act that damages the replicas of node 1's snapshots and then kills node 1."""

    def act(job: Job) -> int:
        job.wait_copies(step, *range(RANKS))
        damaged = damage_snapshots(job.agent_pid(0), step, COPIES)
        lose(1, checkpoint=checkpoint)(job)
        return damaged

    return act


def was_damaged(row: str) -> Callable[[Ended, journal.Incident], None]:
    """Return a check that both replicas existed before the damage."""

    def check(ended: Ended, _: journal.Incident) -> None:
        assert ended.seen[row] == 2

    return check


def lose_after_coordinator(job: Job) -> None:
    """Kill the coordinator; when the next one knows the replicas, kill node 1."""
    job.wait_copies(30, *range(RANKS))
    known = len(job.events_of(journal.NodeJoined))
    job.kill_coordinator()
    job.revive_coordinator()
    job.wait_event(journal.NodeJoined, count=known + 2)
    lose(1, copies=30)(job)


def lose_with_spare(job: Job) -> int:
    """Start a spare and kill node 0; return the spare's process."""
    known = len(job.events_of(journal.NodeJoined, node=SPARE))
    job.bring(SPARE)
    spare = job.wait_event(journal.NodeJoined, count=known + 1, node=SPARE).pid
    job.replaces = False  # not of the spare
    lose(0, copies=35)(job)
    return spare


def see_memory(job: Job) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """Return the steps of each rank's replicas, and the number of replica buffers on each node."""
    job.wait_copies(65, *range(RANKS))
    job.replaces = True
    return job.copies(), [len(buffers(job.agent_pid(node), COPIES)) for node in range(2)]


def shards_in(checkpoint: Path) -> int:
    """Return the number of shards in a checkpoint."""
    return len(list(checkpoint.glob("state-*.safetensors")))


def written(job: Job) -> list[tuple[str, int]]:
    """Return the steps of all checkpoints, and their numbers of shards."""
    return [(path.name.partition("-g")[0], shards_in(path)) for path in job.checkpoints()]


def see_shards(job: Job) -> int:
    """Kill both nodes when a checkpoint exists; return the number of its shards."""
    job.wait_event(journal.Checkpointed, step=70)
    shards = shards_in(job.checkpoints()[0])
    job.kill_node(0, 1)
    return shards


def lost(name: str, step: int, act: Callable[[Job], Any], *nodes: int, **expected: Any) -> Row:
    """Return the row of lost nodes, two steps after a snapshot of all ranks."""
    replaced = {2 * node + rank for node in nodes for rank in (0, 1)}
    settings = {"strategies": None, "lost": 2, "sources": [FROM_REPLICA], "replaced": replaced}
    return paused(name, step, act, **settings | expected)


ROWS = (
    lost("node 0", 17, lose(0, copies=15), 0),
    # Replicas have priority over a checkpoint of the same step.
    lost("node 1", 22, lose(1, checkpoint=20, copies=20), 1),
    # A damaged replica is not loaded; the older replica is.
    lost(
        "damaged copy",
        27,
        lose_damaged(25),
        1,
        lost=7,
        sources=[FROM_REPLICA, FROM_REPLICA],
        check=was_damaged("damaged copy"),
    ),
    # The next coordinator requests the replicas and their nodes. It does not know the last step.
    lost("another coordinator", 32, lose_after_coordinator, 1, lost=0),
    # The spare fetches the lost node's replicas, and keeps replicas itself afterwards.
    lost("spare", 37, lose_with_spare, 0),
    paused("memory", 67, see_memory, strategies=()),
    lost("both nodes", 72, see_shards, 0, 1, sources=None),
)
ALONE = Attempt(
    (paused("one node is left", 12, lose_and_end(1, copies=10)),),
    outcome="stopped",
    replaces=False,
    name="alone",
    after=written,
)
PLAN = plan("two nodes", ALONE, Attempt(ROWS, {"checkpoint_every": 10}))


@pytest.fixture(scope="module")
def attempts(ended_of: EndedOf) -> tuple[Ended, Ended]:
    """Run an attempt that loses a node and is stopped, and an attempt with the rows."""
    ended = ended_of(PLAN)
    return ended.only(0), ended.only(1)


def test_final_checkpoint_after_a_lost_node(attempts: tuple[Ended, Ended]) -> None:
    """The other node writes the lost node's shards from its replicas."""
    first, second = attempts
    first.check_ends()
    assert first.after["alone"] == [("step-0000000010", RANKS)]
    assert second.began() == (10, {"checkpoint": RANKS})


@pytest.mark.parametrize("row", [row for row in ROWS if row.replaced], ids=str)
def test_lost(row: Row, attempts: tuple[Ended, Ended]) -> None:
    """The lost node's ranks get their states from replicas, the others from their snapshots."""
    attempts[1].check(row)


def test_spare_takes_a_lost_place(attempts: tuple[Ended, Ended]) -> None:
    """The spare's agent is now node 0."""
    _, second = attempts
    joined = [event.pid for event in second.of(journal.NodeJoined) if event.node == 0]
    assert second.seen["spare"] in joined


def test_both_nodes_lost(attempts: tuple[Ended, Ended]) -> None:
    """All ranks load the checkpoint, which has each shard once."""
    _, second = attempts
    assert second.seen["both nodes"] == RANKS
    assert second.incidents[-1].sources == {"checkpoint": RANKS}


def test_memory(attempts: tuple[Ended, Ended]) -> None:
    """A node has two replicas for each rank and room for a third, after any number of snapshots."""
    copies, rooms = attempts[1].seen["memory"]
    assert copies == dict.fromkeys(range(RANKS), (60, 65))
    assert max(rooms) <= 3 * 2


def test_end(attempts: tuple[Ended, Ended], baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    attempts[1].check_end(baseline_of("sharded", steps=STEPS))


# ---- four nodes


def see_and_lose_last(job: Job) -> dict[int, set[int]]:
    """Kill node 3; return the ranks whose replicas each node had."""
    job.wait_copies(10, *range(RANKS))
    kept = {node.node: set(node.copies) for node in job.status().nodes}
    job.kill_node(3)
    return kept


def was_a_ring(ended: Ended, _: journal.Incident) -> None:
    """Check that each node keeps the replicas of the node before it, in a ring."""
    assert ended.seen["last node"] == {0: {3}, 1: {0}, 2: {1}, 3: {2}}


def was_from_all(_: Ended, incident: journal.Incident) -> None:
    """Check that each state comes from the nearest source."""
    assert incident.sources == {"checkpoint": 1, "replica": 1, "snapshot": 2}


FOUR = (
    lost(
        "last node",
        12,
        see_and_lose_last,
        replaced={3},
        sources=[{"replica": 1, "snapshot": 3}],
        check=was_a_ring,
    ),
    # A shard and its replica are lost; that shard comes from the checkpoint of the step.
    lost(
        "other nodes",
        22,
        lose(1, 2, checkpoint=20, copies=20),
        replaced={1, 2},
        sources=None,
        check=was_from_all,
    ),
)
FOUR_NODES = plan("four nodes", Attempt(FOUR), nodes=4, checkpoint_every=10)


@pytest.mark.parametrize("row", FOUR, ids=str)
def test_lost_of_four(row: Row, ended_of: EndedOf) -> None:
    """The job loses only the steps after the newest snapshot of all ranks."""
    ended_of(FOUR_NODES).check(row)


def test_end_of_four(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    ended_of(FOUR_NODES).check_end(baseline_of("sharded", steps=STEPS))


# ---- in the soak


def one_after_the_other(step: int, second: int) -> Row:
    """Return the row of node 1 and then another node; a new node gets replicas immediately."""
    faults = (*pause_all(step, life=0), *pause_all(step + 1, life=0))

    def act(job: Job, number: int) -> None:
        for each, node in enumerate((1, second)):
            first = number + each * RANKS
            job.wait_pause(step + each, first=first)
            lose(node, copies=step - 2)(job)
            job.release_all(first)

    replaced = {2, 3, 2 * second, 2 * second + 1}
    name = f"node 1, then node {second}"
    sources = [FROM_REPLICA] * 2
    return Row(name, step, faults, act, None, lost=5, replaced=replaced, sources=sources)


SOAK = (
    lost("both nodes", 7, lose(0, 1), 0, 1, lost=None, sources=None),
    one_after_the_other(12, 0),
    one_after_the_other(17, 1),
    # A damaged replica is not loaded; the checkpoint of the same step is.
    lost(
        "damaged copy",
        22,
        lose_damaged(20, checkpoint=20),
        1,
        sources=[FROM_REPLICA, {"checkpoint": 2, "self": 2}],
        check=was_damaged("damaged copy"),
    ),
)


@pytest.mark.soak
def test_more_of_two_nodes(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """Without a checkpoint the loss of both nodes loses all steps; each other loss is small."""
    ended = ended_of(plan("soak", Attempt(SOAK), checkpoint_every=10))
    for row in SOAK:
        ended.check(row)
    assert ended.incidents_of(SOAK[0])[-1].sources == {"fresh": RANKS}
    ended.check_end(baseline_of("sharded", steps=STEPS))


@pytest.mark.soak
def test_snapshot_of_every_step(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """Ranks wait for their replicas, so that one step is complete: at most two steps are lost."""

    def act(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.kill_node(1)

    pause = Fault(3, "forward", 12, do="pause")
    row = Row("node 1", 12, (pause,), act, None, lost={0, 1, 2}, replaced={2, 3})
    ended = ended_of(plan("every step", Attempt((row,)), snapshot_every=1))
    incident = ended.check(row)
    assert incident is not None
    assert incident.sources["replica"] == 2
    ended.check_end(baseline_of("sharded", steps=STEPS))
