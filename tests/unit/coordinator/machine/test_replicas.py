"""Copies of snapshots on other nodes: which node keeps them, and how recovery uses them."""

from __future__ import annotations

import pytest
from jobs.driver import Driver

from rekindle.coordinator.http_api import job_view
from rekindle.coordinator.machine.job_state import Phase
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy

POLICY = Policy(node_timeout_s=5.0)


def arrive(driver: Driver, finished: int | None = None, shards: int = 4) -> None:
    """Let every rank that does not wait yet arrive with its shard."""
    for rank in driver.ranks:
        if driver.status(rank) is not driver.status(rank).WAITING:
            driver.arrive([rank], finished, shard=rank % shards)


def trained(*, nodes: int = 2, shards: int = 4, steps: tuple[int, ...] = (5, 10)) -> Driver:
    """Return a job of four ranks with copies of these steps on the nodes that the plan names."""
    kept = tuple((step, 1) for step in steps)
    driver = Driver(nodes=nodes, processes=4 // nodes, policy=POLICY)
    for node in range(nodes):
        driver.hello(node, replica_port=7000 + node)
    driver.store_up()
    driver.spawned()
    arrive(driver, shards=shards)
    forms = driver.sent_by_node(p.FormGeneration)
    driver.ready(driver.ranks)
    driver.step(12)
    for node, form in forms.items():
        driver.say(node, p.Snapshots(kept=dict.fromkeys(form.plan, kept)))
        for rank, own in form.plan.items():
            if own.replica_node >= 0:
                driver.say(own.replica_node, p.Snapshots(kept={rank: kept}, copies=True))
    return driver


def lose(driver: Driver, *nodes: int, **hello: object) -> None:
    """Lose these nodes, replace each with another agent, and let all ranks arrive."""
    for node in nodes:
        driver.lose(node)
    for node in nodes:
        driver.hello(node, replica_port=8000 + node, **hello)
    if driver.stores:
        driver.store_up()
    driver.spawned()
    for rank in driver.ranks:
        if driver.node_of(rank) not in nodes:
            driver.arrive([rank], 12, shard=rank)
        else:
            driver.arrive([rank], shard=rank)


def sources(driver: Driver) -> list[str]:
    plan = {
        r: own
        for form in driver.sent_by_node(p.FormGeneration).values()
        for r, own in form.plan.items()
    }
    return [plan[rank].source.value for rank in driver.ranks]


def test_the_plan_says_who_keeps_what_and_where() -> None:
    """Each agent gets the addresses of the replica servers that its own ranks need."""
    driver = Driver(nodes=2, processes=2)
    for node in range(2):
        driver.hello(node, replica_port=7000 + node)
    driver.store_up()
    driver.spawned()
    arrive(driver)
    forms = driver.sent_by_node(p.FormGeneration)
    for node, form in forms.items():
        other = 1 - node
        assert {own.replica_node for own in form.plan.values()} == {other}
        assert form.replica_addresses == {
            other: p.ReplicaAddress(host=f"10.0.0.{other}", port=7000 + other)
        }


def test_replicas_need_no_copies() -> None:
    """If both nodes hold both shards, the plan requests no copies."""
    driver = Driver(nodes=2, processes=2)
    driver.start()
    arrive(driver, shards=2)
    for form in driver.sent_by_node(p.FormGeneration).values():
        assert form.replica_addresses == {}
        assert {own.replica_node for own in form.plan.values()} == {-1}


def test_a_lost_node_comes_from_its_replica() -> None:
    """After a lost node, all ranks return to the newest step that every shard has."""
    driver = trained()
    lose(driver, 1)
    assert sources(driver) == ["snapshot", "snapshot", "replica", "replica"]
    form = driver.sent_by_node(p.FormGeneration)[1]
    assert form.step == 10
    assert {own.node for own in form.plan.values()} == {0}
    assert form.replica_addresses == {0: p.ReplicaAddress(host="10.0.0.0", port=7000)}
    formed = driver.last(journal.Formed)
    assert (formed.step, formed.newest) == (10, 12)
    assert driver.sent_by_node(p.FormGeneration)[0].replica_addresses == {
        1: p.ReplicaAddress(host="10.0.0.1", port=8001)
    }


def test_copies_are_lost_with_their_node() -> None:
    """A shard is lost if its node and the node with its copy are lost together, otherwise not."""
    driver = trained(nodes=4)
    lose(driver, 1, 2)  # node 2 had the copies of rank 1
    assert not driver.sent_by_node(p.FormGeneration)
    assert sorted(driver.doomed) == [0, 3]  # all ranks restart
    driver = trained(nodes=4)
    lose(driver, 1, 3)
    assert sources(driver) == ["snapshot", "replica", "snapshot", "replica"]


def test_a_refused_copy() -> None:
    """If a copy is refused, the plan takes the older copy, then the checkpoint."""
    driver = trained()
    driver.say(0, p.CheckpointWritten(step=4, generation=1, path="there", shards=4))
    lose(driver, 1, checkpoints=((4, 1),))
    for step, source in ((5, "replica"), (4, "checkpoint")):
        driver.ready([3], error="checksum is wrong")
        for rank in driver.ranks:
            driver.arrive([rank], 10 if rank < 2 else None, shard=rank)
        assert driver.sent_by_node(p.FormGeneration)[1].step == step
        assert sources(driver)[2:] == [source] * 2
    assert driver.machine.generations._refused == {
        (1, StateSource.REPLICA, (10, 1)),
        (1, StateSource.REPLICA, (5, 1)),
    }


def test_copies_that_are_forgotten() -> None:
    """After a return to step 5, the plan counts only the snapshots that the agents report."""
    driver = trained()
    driver.say(1, p.Snapshots(kept={2: ((5, 1),)}))
    driver.exits(2, signal=9)
    driver.spawned()
    driver.say(0, p.Snapshots(kept={2: ((5, 1),), 3: ((5, 1),)}, copies=True))
    driver.say(1, p.Snapshots(kept={0: ((5, 1),), 1: ((5, 1),)}, copies=True))
    for rank in driver.ranks:
        driver.arrive([rank], None if rank == 2 else 12, shard=rank)
    assert driver.last(journal.Formed).step == 5
    assert sources(driver) == ["snapshot"] * 4


def test_a_copy_is_better_than_a_snapshot_that_is_missing() -> None:
    """A rank whose agent lacks the snapshot of the step gets its copy from the other node."""
    driver = trained()
    driver.say(1, p.Snapshots(kept={2: ((5, 1),)}))
    driver.exits(2, signal=9)
    driver.spawned()
    for rank in driver.ranks:
        driver.arrive([rank], None if rank == 2 else 12, shard=rank)
    assert sources(driver) == ["snapshot", "snapshot", "replica", "snapshot"]
    assert driver.last(journal.Formed).step == 10


def test_another_coordinator_is_told() -> None:
    """In its hello to a new coordinator, an agent lists its snapshots, copies and replica port."""
    driver = trained()
    driver.lose_coordinator()
    for node in range(2):
        own = [rank for rank in driver.ranks if driver.node_of(rank) == node]
        others = [rank for rank in driver.ranks if rank not in own]
        driver.hello(
            node,
            replica_port=7100 + node,
            generation=1,
            ranks=tuple(p.LiveRank(rank=r, pid=driver.pids[r], training=True) for r in own),
            shards={rank: rank for rank in own},
            snapshots=dict.fromkeys(own, ((5, 1), (10, 1))),
            copies=dict.fromkeys(others, ((5, 1), (10, 1))),
        )
    lose(driver, 1)
    if not driver.sent_by_node(p.FormGeneration):
        driver.store_up()
    assert sources(driver) == ["snapshot", "snapshot", "replica", "replica"]
    assert driver.sent_by_node(p.FormGeneration)[1].replica_addresses == {
        0: p.ReplicaAddress(host="10.0.0.0", port=7100)
    }


def test_final_checkpoint_of_a_lost_node() -> None:
    """The node with the copies writes the lost node's shards of the final checkpoint.

    It also writes its own shards.
    """
    driver = trained()
    driver.lose(1)
    driver.stop()
    driver.killed()
    assert driver.phase is Phase.FINAL_CHECKPOINT
    [(node, dump)] = driver.sent_by_node(p.WriteFinalCheckpoint).items()
    assert (node, dump.step, dump.shards) == (0, 10, {0: 0, 1: 1, 2: 2, 3: 3})


def test_final_checkpoint_are_every_nodes_own() -> None:
    """Each node writes its own shards. The job uses copies only if a shard has no other source."""
    driver = trained()
    driver.stop()
    driver.killed()
    dumps = driver.sent_by_node(p.WriteFinalCheckpoint)
    assert {node: dump.shards for node, dump in dumps.items()} == {
        0: {0: 0, 1: 1},
        1: {2: 2, 3: 3},
    }
    failed = p.ShardWritten(
        step=10, generation=1, shard=2, shards=4, final=True, error="it is damaged"
    )
    driver.say(1, failed)
    [(node, dump)] = driver.sent_by_node(p.WriteFinalCheckpoint).items()
    assert (node, dump.shards) == (0, {0: 0, 1: 1, 2: 2, 3: 3})


def test_what_people_see() -> None:
    """The job view lists the copies that each node keeps."""
    view = job_view(trained().machine, "")
    assert [node.copies for node in view.nodes] == [
        {2: (5, 10), 3: (5, 10)},
        {0: (5, 10), 1: (5, 10)},
    ]


@pytest.mark.parametrize("rank", [4, -1])
def test_ranks_that_the_job_has_not(rank: int) -> None:
    """An agent that names ranks outside the job breaks the protocol, and a hello is refused."""
    driver = trained()
    with pytest.raises(ProtocolError, match="ranks that the job does not have"):
        driver.machine.on_message(
            driver.nodes[0], p.Snapshots(kept={rank: ((5, 1),)}, copies=True), 0.0
        )
    driver.lose(1)
    driver.hello(1, copies={rank: ((5, 1),)})
    (refused,) = driver.refusals()
    assert "named ranks that the job does not have" in refused
