"""Steps that ran more than once: the machine never mixes their states."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.trained import SIGKILL, sources

from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource


def formed(job: Driver) -> tuple[int, int]:
    """Return the step that the newest generation started from, and the generation that made it."""
    newest = job.last(journal.Formed)
    return newest.step, newest.state_generation


def arrive_anew(job: Driver, **finished: int) -> None:
    """Let two ranks arrive, each with its own shard. A rank without a step is a new process."""
    for rank in job.ranks:
        job.arrive([rank], finished.get(f"rank{rank}"), shard=rank)


def went_back() -> Driver:
    """Return a job of two shards that have finished their first step."""
    job = Driver(nodes=2, processes=1)
    job.start()
    arrive_anew(job)
    job.ready(job.ranks)
    job.step(1)
    return job


def gone_back() -> Driver:
    """Return a job of two shards that trained to step 9, returned to 4, and reached 9 again."""
    job = went_back()
    for step in (4, 8):
        job.say(0, p.CheckpointWritten(step=step, generation=1, path="there", shards=2))
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=9)
    job.spawned()
    arrive_anew(job)
    assert formed(job) == (8, 1)
    job.ready([1], error="a file cannot be read")
    job.arrive([0], 8, state_generation=2, shard=0)
    job.arrive([1], 0, torn=True, shard=1)
    assert formed(job) == (4, 1)
    job.ready(job.ranks)
    job.step(5)
    for rank in job.ranks:
        job.say(rank, p.Snapshots(kept={rank: ((6, 3), (8, 3))}))
    return job


def test_a_step_done_again_is_another_state() -> None:
    """A checkpoint of a first pass is never combined with a snapshot of the second pass."""
    job = gone_back()
    job.say(0, p.Snapshots(kept={1: ((6, 3),)}, copies=True))
    job.lose(1)
    job.hello(1, replica_port=1, checkpoints=((8, 1), (4, 1)))
    job.spawned()
    job.arrive([0], 9, shard=0)
    job.arrive([1], shard=1)
    assert formed(job) == (8, 1)  # complete, and newer than step 6 of the second pass
    assert set(sources(job).values()) == {StateSource.CHECKPOINT}


def test_what_was_gone_back_from_is_another_state() -> None:
    """After a return to the first pass, the second pass's snapshots of that step do not count."""
    job = gone_back()
    job.lose(1)
    job.hello(1, checkpoints=((8, 1), (4, 1)))
    job.spawned()
    job.arrive([0], 9, shard=0)
    job.arrive([1], shard=1)
    assert formed(job) == (8, 1)
    job.ready(job.ranks)
    job.exits(0, signal=SIGKILL, finished=8)
    job.spawned()
    job.arrive([1], 8, state_generation=1, shard=1)
    job.arrive([0], shard=0)
    assert formed(job) == (8, 1)
    assert set(sources(job).values()) == {StateSource.CHECKPOINT, StateSource.SELF}


def test_nodes_with_stores_of_their_own() -> None:
    """If two nodes store different passes of step 8, all ranks take the same one."""
    job = Driver(nodes=2, processes=1, generation=3)
    job.hello(0, checkpoints=((8, 1),))
    job.hello(1, checkpoints=((8, 2),))
    job.store_up()
    job.spawned()
    job.arrive(job.ranks)
    assert formed(job) == (8, 2)
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.CHECKPOINT}


def test_parts_of_before_a_take_over() -> None:
    """Shards that two generations wrote never become one checkpoint."""
    job = gone_back()
    job.say(0, p.ShardWritten(step=9, generation=3, shard=0, shards=2))
    job.lose_coordinator()
    for rank in job.ranks:
        alive = (p.LiveRank(rank=rank, pid=job.pids[rank], training=True),)
        job.hello(rank, generation=3, ranks=alive)
    job.say(1, p.ShardWritten(step=9, generation=2, shard=1, shards=2))
    job.say(0, p.ShardWritten(step=9, generation=3, shard=0, shards=2))
    assert not job.sent(p.Commit)


def test_final_checkpoint_of_before_a_regroup() -> None:
    """The final checkpoint names the generation that finished the step, not the current one."""
    job = went_back()
    for rank in job.ranks:
        job.say(rank, p.Snapshots(kept={rank: ((20, 1),)}))
    job.fail_step(0)
    for rank in job.ranks:
        job.arrive([rank], 20, state_generation=1, shard=rank)
    assert job.last(journal.Formed).generation == 2
    job.ready(job.ranks)
    job.stop()
    job.killed()
    for node, order in job.sent_by_node(p.WriteFinalCheckpoint).items():
        assert (order.step, order.generation) == (20, 1)
        part = p.ShardWritten(step=20, generation=1, shard=node, shards=2, final=True)
        job.say(node, part)
    assert [order.message.final for order in job.sent(p.Commit)] == [True]


def test_final_checkpoint_beside_a_checkpoint_that_is_being_written() -> None:
    """A final checkpoint and a checkpoint of the same state never share their parts."""
    job = gone_back()
    for rank in job.ranks:
        job.say(rank, p.Snapshots(kept={rank: ((9, 3),)}))
    job.stop()
    job.killed()
    parts = [
        p.ShardWritten(step=9, generation=3, shard=shard, shards=2, final=words)
        for shard, words in ((0, True), (0, False), (1, False), (1, True))
    ]
    orders = []
    for part in parts:
        job.say(part.shard, part)
        orders += [order.message.final for order in job.sent(p.Commit)]
    assert orders == [False, True]
