"""Checkpoints: which are written, how often, and which are removed."""

from __future__ import annotations

import msgspec
import pytest
from jobs.driver import Driver

from rekindle.coordinator.machine.inheritance import earlier
from rekindle.coordinator.machine.job_state import Phase
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

POLICY = Policy(node_timeout_s=5.0)


def trained(**spec: object) -> Driver:
    """Return a job in its first generation: two nodes with one rank and one shard each."""
    driver = Driver(nodes=2, processes=1, policy=POLICY, **spec)
    for node in range(2):
        driver.hello(node)
    driver.store_up()
    driver.spawned()
    for rank in driver.ranks:
        driver.arrive([rank], shard=rank)
    driver.ready(driver.ranks)
    for node in range(2):
        driver.say(node, p.Heartbeat(finished={node: 0}))
    driver.now += 1000.0  # the first step of a generation is slower than others
    driver.step(1)
    return driver


def due(driver: Driver, step: int, *nodes: int) -> None:
    for node in nodes or (0, 1):
        part = p.ShardReady(step=step, generation=1, rank=node, shard=node, shards=2)
        driver.say(node, part)


def write(driver: Driver, step: int) -> None:
    """Let both shards be written and the checkpoint be committed."""
    for shard in range(2):
        driver.say(shard, p.ShardWritten(step=step, generation=1, shard=shard, shards=2))
    [node] = driver.sent_by_node(p.Commit)
    done = p.CheckpointWritten(step=step, generation=1, path="there", shards=2, seconds=3.0)
    driver.say(node, msgspec.structs.replace(done, stall_s=0.01))


def left_out(driver: Driver) -> list[int]:
    return [event.step for event in driver.recorded(journal.CheckpointLeftOut)]


def test_all_shards_of_one_step() -> None:
    """Shards are written when all are ready. During a write, only the newest step waits."""
    driver = trained()
    due(driver, 5, 1)
    assert driver.sent_by_node(p.WriteShards) == {}
    due(driver, 5, 0)
    orders = driver.sent_by_node(p.WriteShards)
    assert {node: (o.step, o.shards, o.of) for node, o in orders.items()} == {
        0: (5, {0: 0}, 2),
        1: (5, {1: 1}, 2),
    }
    for step in (10, 15):
        due(driver, step)
        assert driver.sent_by_node(p.WriteShards) == {}
    assert left_out(driver) == [10]
    write(driver, 5)
    assert {order.step for order in driver.sent_by_node(p.WriteShards).values()} == {15}
    assert driver.last(journal.CheckpointLeftOut).in_words() == (
        "no checkpoint of step 10: the store was busy with the checkpoint of step 5"
    )


def test_a_node_that_cannot_write_it() -> None:
    """If a node cannot write, the checkpoint is left out once, and the next one is written."""
    driver = trained()
    due(driver, 5)
    no = p.WriteLeftOut(step=5, generation=1, shards=2, reason="busy")
    driver.say(0, no)
    driver.say(1, no)
    assert left_out(driver) == [5]
    due(driver, 10)
    assert len(driver.sent_by_node(p.WriteShards)) == 2
    driver.say(0, p.ShardWritten(step=10, generation=1, shard=0, shards=2, error="disk full"))
    due(driver, 15)
    assert len(driver.sent_by_node(p.WriteShards)) == 2


def test_the_end_waits_for_what_is_due() -> None:
    """The job ends after its last due checkpoint is written."""
    driver = trained()
    due(driver, 20)
    due(driver, 24)
    for rank in driver.ranks:
        driver.exits(rank, code=0)
    assert driver.outcome is None
    write(driver, 20)
    assert driver.outcome is None
    write(driver, 24)
    assert driver.outcome is True


def test_what_a_broken_generation_had_due() -> None:
    """Checkpoints of a broken generation are dropped, and no lost node gets an order to write."""
    driver = trained()
    due(driver, 5)
    due(driver, 10)
    driver.lose(1)
    write_error = p.ShardWritten(step=5, generation=1, shard=0, shards=2, error="no")
    driver.say(0, write_error)
    assert driver.sent_by_node(p.WriteShards) == {}
    assert driver.machine.checkpoints.assembly.backlog.is_empty


def test_the_interval_is_chosen() -> None:
    """When the cost of a checkpoint is known, all agents get the new interval.

    The next coordinator reads it from the journal.
    """
    driver = trained(checkpoint_every="auto")
    assert driver.machine.checkpoints.interval.steps == 10
    for step in (2, 4):
        driver.now += 1.0
        driver.say(0, p.Heartbeat(finished={0: step}))
    due(driver, 10)
    write(driver, 10)
    settings = driver.sent_by_node(p.Settings)
    [steps] = {order.checkpoint_every for order in settings.values()}
    assert set(settings) == {0, 1}
    chosen = driver.last(journal.CheckpointInterval)
    assert chosen.steps == steps > 1000
    assert "takes 3.0 s to write" in chosen.reason
    assert earlier(driver.history).checkpoint_every == steps


def test_nobody_restores_what_was_removed() -> None:
    """A removed checkpoint is deleted from all nodes' lists and recorded in the journal."""
    driver = trained()
    for step in (5, 10):
        due(driver, step)
        write(driver, step)
    driver.say(0, p.Pruned(removed=((5, 1),)))
    nodes = driver.machine.job.roster.nodes.values()
    assert {node.checkpoints for node in nodes} == {((10, 1),)}
    assert driver.last(journal.CheckpointsPruned).in_words() == (
        "the job removed the checkpoints of step 5"
    )


def test_a_rank_without_memory_for_snapshots() -> None:
    """The journal names the rank and the reason, and training continues."""
    driver = trained()
    driver.say(1, p.SnapshotRefused(rank=1, error="no memory for 3 snapshots"))
    [failed] = driver.recorded(journal.CheckpointFailed)
    assert failed.fault.message == "rank 1 does not keep snapshots: no memory for 3 snapshots"
    assert (failed.fault.kind, failed.fault.node) == (FaultKind.STORAGE, 1)
    assert driver.phase is Phase.TRAINING


def test_a_skipped_step_is_an_incident_of_its_own() -> None:
    """It is recorded and closed at once, and training continues."""
    driver = trained()
    driver.say(1, p.StepLeftOut(rank=1, generation=1, step=7, reason="a gradient is not finite"))
    [skipped] = driver.recorded(journal.StepSkipped)
    text = "all ranks skip step 7: a gradient is not finite"
    assert (skipped.fault.kind, skipped.fault.message) == (FaultKind.SKIPPED_STEP, text)
    [incident] = journal.incidents([skipped])
    assert (incident.closed, incident.steps_lost, incident.strategy) == (True, 0, None)
    assert driver.phase is Phase.TRAINING


def test_a_message_that_is_not_for_the_coordinator() -> None:
    """A message that an agent must not send is refused by name.

    A late answer to a check is ignored.
    """
    driver = trained()
    driver.say(0, p.Checked(serial=1))
    driver.say(0, p.CheckReady(port=1))
    with pytest.raises(ProtocolError, match="node 0 sent a Welcome"):
        driver.machine.on_message(driver.nodes[0], p.Welcome(node=0), driver.now)
