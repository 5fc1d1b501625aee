"""Copies of snapshots on a neighbour: any one node may be lost where no shard has a replica."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, assert_same_training, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.memory import COPIES, buffers, damage_snapshots
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.policy import Policy

PAUSE_ALL = pause_all(12)
SNAPSHOTS = {"variant": "sharded", "nodes": 2, "snapshot_every": 5}


def sources(run: Job) -> list[dict[str, int]]:
    """Where the ranks' states came from, in each generation but the first."""
    return [event.sources for event in run.events_of(journal.Formed)][1:]


def lose(run: Job, *nodes: int) -> None:
    """Kill nodes whose ranks pause, and let the others go on."""
    run.kill_node(*nodes)
    run.release_all()


@pytest.mark.parametrize("node", soak_but([0, 1], 0))
def test_lost_node(node: int, job: Callable[..., Job], baseline_of: Callable[[str], Record]):
    """Its ranks' states come from its neighbour, those of the others from their own snapshots."""
    run = job(*PAUSE_ALL, **SNAPSHOTS)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    lose(run, node)
    assert_recovered(run, baseline_of("sharded"), replaced={2 * node, 2 * node + 1})
    assert sources(run) == [{"neighbour": 2, "snapshot": 2}]
    assert steps_lost(run) == [2]
    assert run.checkpoints() == []


def test_lost_node_of_four(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """The last one's neighbour is the first."""
    run = job(*PAUSE_ALL, variant="sharded", nodes=4)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    kept = {node.node: set(node.copies) for node in run.status().nodes}
    assert kept == {0: {3}, 1: {0}, 2: {1}, 3: {2}}
    lose(run, 3)
    assert_recovered(run, baseline_of("sharded"), replaced={3})
    assert (sources(run), steps_lost(run)) == ([{"neighbour": 1, "snapshot": 3}], [2])


def test_lost_neighbours(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """With a shard and its copy gone, that one comes from the checkpoint of the step, at best."""
    run = job(*PAUSE_ALL, variant="sharded", nodes=4, checkpoint_every=5)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    run.wait_event(journal.Checkpointed, step=10)
    lose(run, 1, 2)
    assert_recovered(run, baseline_of("sharded"), replaced={1, 2})
    assert sources(run)[-1] == {"checkpoint": 1, "neighbour": 1, "snapshot": 2}
    assert sum(steps_lost(run)) == 2


@pytest.mark.parametrize("checkpoint_every", soak_but([5, 0], 5))
def test_both_nodes_lost(
    checkpoint_every: int, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """What is not in the store is gone."""
    run = job(*PAUSE_ALL, **SNAPSHOTS, checkpoint_every=checkpoint_every)
    run.wait_pause(12)
    if checkpoint_every:
        run.wait_event(journal.Checkpointed, step=10)
    lose(run, 0, 1)
    assert_recovered(run, baseline_of("sharded"), replaced=range(RANKS))
    assert sources(run)[-1] == {"checkpoint" if checkpoint_every else "fresh": RANKS}


@pytest.mark.soak
@pytest.mark.parametrize("second", [0, 1])
def test_two_nodes_lost_one_after_the_other(
    second: int, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """The new node gets copies at once of what its neighbour has: before the next snapshot."""
    again = [Fault(rank, "forward", 13, do="pause", life=0) for rank in range(RANKS)]
    run = job(*PAUSE_ALL, *again, **SNAPSHOTS)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    lose(run, 1)
    run.wait_pause(13, first=RANKS)
    run.wait_copies(10, *range(RANKS))
    run.kill_node(second)
    run.release_all(first=RANKS)
    assert_recovered(run, baseline_of("sharded"), replaced={2, 3, 2 * second, 2 * second + 1})
    assert sources(run) == [{"neighbour": 2, "snapshot": 2}] * 2
    assert steps_lost(run) == [2, 3]


@pytest.mark.parametrize(
    ("checkpoint_every", "found", "lost"),
    soak_but(
        [(0, {"neighbour": 2, "snapshot": 2}, 7), (5, {"checkpoint": 2, "self": 2}, 2)],
        (0, {"neighbour": 2, "snapshot": 2}, 7),
    ),
)
def test_damaged_copy(
    checkpoint_every: int,
    found: dict[str, int],
    lost: int,
    job: Callable[..., Job],
    baseline_of: Callable[[str], Record],
) -> None:
    """It is not loaded: the checkpoint of the same step is, or else the older copy."""
    run = job(*PAUSE_ALL, **SNAPSHOTS, checkpoint_every=checkpoint_every)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    if checkpoint_every:
        run.wait_event(journal.Checkpointed, step=10)
    assert damage_snapshots(run.agent_pid(0), 10, COPIES) == 2
    lose(run, 1)
    assert_recovered(run, baseline_of("sharded"), replaced={2, 3})
    assert sources(run) == [{"neighbour": 2, "snapshot": 2}, found]
    assert sum(steps_lost(run)) == lost


@pytest.mark.parametrize(
    ("variant", "nodes"), soak_but([("hybrid", 2), ("sharded", 1)], ("sharded", 1))
)
def test_no_copies_where_they_protect_nothing(
    variant: str, nodes: int, job: Callable[..., Job]
) -> None:
    """A replica lives on another node; or there is no other node."""
    run = job(*PAUSE_ALL, variant=variant, nodes=nodes)
    run.wait_pause(12)
    for node in range(nodes):
        assert buffers(run.agent_pid(node), COPIES) == []
    assert run.copies() == {}
    run.release_all()
    assert run.end().outcome == "succeeded"


def test_memory(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """Of each rank two copies and room for one, however many snapshots there were."""
    run = job(*pause_all(20), variant="sharded", nodes=2, snapshot_every=2)
    run.wait_pause(20)
    run.wait_copies(20, *range(RANKS))
    assert {rank: run.copies()[rank] for rank in range(RANKS)} == dict.fromkeys(
        range(RANKS), (18, 20)
    )
    for node in range(2):
        assert len(buffers(run.agent_pid(node), COPIES)) <= 3 * 2
    run.release_all()
    assert_recovered(run, baseline_of("sharded"), replaced=())


@pytest.mark.soak
def test_snapshot_of_every_step(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Ranks wait for their copies, so that one step is there of all: no more than two are lost."""
    run = job(Fault(3, "forward", 12, do="pause"), variant="sharded", nodes=2, snapshot_every=1)
    run.wait_fault(0)
    run.kill_node(1)
    assert_recovered(run, baseline_of("sharded"), replaced={2, 3})
    assert [each["neighbour"] for each in sources(run)] == [2]
    assert sum(steps_lost(run)) <= 2


def test_another_coordinator(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """It is told of the copies, and where they are."""
    run = job(*PAUSE_ALL, **SNAPSHOTS)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    run.kill_coordinator()
    run.revive_coordinator()
    run.wait_event(journal.NodeJoined, count=4)
    run.wait_copies(10, *range(RANKS))
    lose(run, 1)
    assert_recovered(run, baseline_of("sharded"), replaced={2, 3})
    assert sources(run)[-1] == {"neighbour": 2, "snapshot": 2}


def test_spare_takes_a_lost_place(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """It fetches the lost node's copies, and keeps some itself afterwards."""
    run = job(*PAUSE_ALL, **SNAPSHOTS, spares=1)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    lose(run, 0)
    run.wait_event(journal.FirstStep, count=2)
    run.wait_copies(10, *range(RANKS))
    assert_recovered(run, baseline_of("sharded"), replaced={0, 1})
    assert sources(run) == [{"neighbour": 2, "snapshot": 2}]


def test_last_words_after_a_lost_node(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """The neighbour writes the lost node's shards from its copies."""
    run = job(*PAUSE_ALL, **SNAPSHOTS, policy=Policy(node_timeout_s=0.5), replaces=False)
    run.wait_pause(12)
    run.wait_copies(10, *range(RANKS))
    lose(run, 1)
    assert run.end().outcome == "failed"
    [path] = run.checkpoints()
    assert path.name.startswith("step-0000000010")
    assert len(list(path.glob("state-*.safetensors"))) == RANKS
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline_of("sharded"))
    assert run.leftovers() == []
