"""Planned moves while spares are lost, ranks restart, scripts change, and checkpoints are late."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.moving import Moving

from rekindle.coordinator.machine.job_state import Phase
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.protocol.agent import Inject, InjectionKind, ShardReady, ShardWritten
from rekindle.recovery.faults.fault import Exit
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

RESTARTS = Policy(max_restarts=3)


def prepared(**settings: object) -> Moving:
    """Return a job whose spare has prepared the move of node 1."""
    job = Moving(**settings)
    job.drain()
    job.prepare()
    return job


def wanted(job: Driver) -> list[int]:
    """Return the nodes that the job has requested."""
    return [event.node for event in job.recorded(journal.NodeWanted)]


# ---- the spare is lost


def test_the_spare_is_lost_in_the_pause() -> None:
    """The node stays if its spare is lost while the ranks leave their step."""
    job = prepared()
    job.leave()
    job.lose_spare(job.spare)
    job.arrive(job.ranks, 1)
    assert not job.recorded(journal.NodeLeft)
    assert job.sent(p.FormGeneration)
    job.ready(job.ranks)
    job.step(2)
    job.spare = job.hello(spare=True)
    job.prepare()
    job.pause(2)
    assert job.promoted() == [(job.spare, 1)]


def test_the_spare_is_lost_while_another_rank_recovers() -> None:
    """The node stays if its spare is lost while a rank of a third node starts again."""
    job = prepared(nodes=3)
    job.exits(2, signal=9)
    job.lose_spare(job.spare)
    job.spawned()
    job.arrive([0, 1], 1)
    job.arrive([2])
    assert not job.recorded(journal.NodeLeft)
    assert job.sent(p.FormGeneration)


def test_one_request_for_one_spare() -> None:
    """The loss of a spare leads to one request, and its replacement does the move."""
    job = Moving()
    job.drain()
    job.lose_spare(job.spare)
    assert wanted(job) == [SPARE]
    job.spare = job.hello(spare=True)
    job.prepare()
    job.pause()
    job.take_place()
    job.ready(job.ranks)
    job.step(2)
    assert wanted(job) == [SPARE, SPARE]  # the second one replaces the spare that moved


def test_a_rank_of_the_spare_ends_after_the_promotion() -> None:
    """Another spare takes the place if a rank ends before the promoted spare has it."""
    job = Moving(spares=2)
    job.drain()
    other = job.spare
    job.spare = job.sent(p.Prepare)[0].connection
    job.prepare()
    job.pause()
    assert job.promoted() == [(job.spare, 1)]
    job.clear()
    assert job.promoted() == [(other, 1)]
    assert wanted(job) == [SPARE]


def test_a_rank_of_the_only_spare_ends_after_the_promotion() -> None:
    """The engine brings another agent if there is no other spare."""
    job = prepared()
    job.pause()
    job.clear()
    assert wanted(job) == [1]
    job._checks.gone([1])  # the rank of the earlier agent waits until this agent ends
    job.hello()
    assert [event.node for event in job.recorded(journal.Moved)] == [1]


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_that_never_arrives_on_the_spare(*, stopped: bool) -> None:
    """A spare is dismissed if a rank is stopped there, or is late."""
    job = Moving()
    job.drain()
    job.tell(p.Spawned(ranks=(p.LiveRank(rank=1, pid=901),), generation=2))
    if stopped:
        job.tell(p.RankStalled(rank=1, generation=0, stopped=True))
        reason = "rank 1 is stopped by a signal there"
    else:
        job.fire("prepare")
        reason = "its ranks did not reach their Session within 600 s"
    assert job.last(journal.NodeLeft).reason == reason
    assert [each.connection for each in job.sent(p.EndAgent)] == [job.spare]
    assert wanted(job) == [SPARE]


def test_a_prepared_spare_is_not_late() -> None:
    """The limit has no effect on a spare whose ranks all wait."""
    job = prepared()
    job.fire("prepare")
    assert not job.sent(p.EndAgent)


# ---- all ranks restart


def test_all_ranks_restart() -> None:
    """A restart ends the prepared ranks. The spare prepares the move again, which does not fail."""
    job = prepared(policy=RESTARTS)
    job.raises(0)
    assert [each.message.ranks for each in job.sent(p.Kill) if each.connection == job.spare] == [
        (1,)
    ]
    job.clear()
    job.killed()
    job.store_up()
    job.spawned()
    job.arrive(job.ranks)
    assert not job.recorded(journal.NodeLeft)
    job.ready(job.ranks)
    job.step(1)
    assert [each.connection for each in job.sent(p.Prepare)] == [job.spare]
    job.prepare()
    job.pause()
    assert job.promoted() == [(job.spare, 1)]
    assert job.machine.moves._moves[1].failures == 0


@pytest.mark.parametrize("lost_first", [True, False])
def test_the_node_is_lost_in_a_restart(*, lost_first: bool) -> None:
    """The spare takes the place of a node that is lost in a restart, without its old ranks."""
    job = prepared(policy=RESTARTS)
    job.raises(0)
    if lost_first:
        job.lose(1)
        assert not job.promoted()
        job.clear()
    else:
        job.clear()
        job.lose(1)
    assert job.promoted() == [(job.spare, 1)]
    job.hello_again(job.spare, 1, spare=True)
    assert job.refusals() == []
    job.store_up()
    assert job.spawned_now() == [0, 1]


def test_the_node_is_lost_after_the_last_step() -> None:
    """The spare also takes the place if the loss itself leads to the restart."""
    job = prepared(policy=RESTARTS)
    for rank in job.ranks:
        job.arrive([rank], 1, done=True)
    assert job.sent(p.EndSession)
    job.lose(1)
    assert job.phase is Phase.RESTARTING
    assert not job.promoted()
    job.clear()
    assert job.promoted() == [(job.spare, 1)]


def test_a_prepared_rank_ends_well_before_its_end() -> None:
    """A spare whose rank ended with status 0 is dismissed, and another agent gets the place."""
    job = prepared(policy=RESTARTS)
    job.raises(0)
    job.lose(1)
    job.tell(p.Exited(rank=1, pid=901, exit=Exit(code=0), finished=0))
    assert [each.connection for each in job.sent(p.EndAgent)] == [job.spare]
    assert wanted(job)[-1] == 1


# ---- a loss comes before a move


def test_another_node_is_lost() -> None:
    """The only spare replaces a lost node. Its prepared ranks end first, and the move waits."""
    job = prepared(nodes=3)
    job.lose(0)
    assert "a spare replaces it" in job.last(journal.Decided).reason
    assert not job.promoted()
    assert wanted(job) == [SPARE]
    job.clear()
    assert job.promoted() == [(job.spare, 0)]
    job.arrive([1, 2], 1)
    job.hello_again(job.spare, 0, spare=True)
    job.store_up()
    job.spawned()
    job.arrive([0])
    job.ready(job.ranks)
    job.step(2)
    assert not job.sent(p.Prepare)
    assert wanted(job) == [SPARE]
    job.spare = job.hello(spare=True)
    assert [each.message.node for each in job.sent(p.Prepare)] == [1]


def test_a_released_spare_that_does_not_end_its_ranks() -> None:
    """A spare whose prepared ranks do not end is dismissed, and another agent gets the place."""
    job = prepared(nodes=3)
    job.lose(0)
    job.fire("prepare")
    assert [each.connection for each in job.sent(p.EndAgent)] == [job.spare]
    assert wanted(job)[-1] == 0


# ---- the script has changed


def test_a_changed_script() -> None:
    """A move ends if the new ranks run another text. The spare stays in reserve."""
    job = Moving()
    for rank in job.machine.job.roster.world:
        assert rank.arrived is not None
        rank.arrived.sources["train.py"] = "old"
    job.drain()
    job.tell(p.Spawned(ranks=(p.LiveRank(rank=1, pid=901),), generation=2))
    job.tell(p.Arrived(rank=1, generation=0, sources={"train.py": "new", "other.py": "new"}))
    assert job.last(journal.MoveEnded).reason == (
        "rank 1 would run another text of train.py there than rank 0; the file has changed, or "
        "differs between nodes"
    )
    assert not job.sent(p.PauseRequest)
    assert job.phase is Phase.TRAINING
    job.clear()
    job.lose(1)
    assert job.promoted() == [(job.spare, 1)]


def test_a_newcomer_with_another_script() -> None:
    """Of two ranks with different texts, the one that joins is to blame."""
    job = Driver(nodes=2, processes=1, least=1)
    job.hello(0)
    job.fire("late")
    job.store_up()
    job.spawned()
    job.arrive([0], sources={"train.py": "old"})
    job.ready([0])
    job.step_of([0], 1)
    job.hello(1)
    job.spawned()
    job.arrive([1], sources={"train.py": "new"})
    job.say(0, p.Paused(rank=0, generation=1, finished=1))
    job.arrive([0], 1, sources={"train.py": "old"})
    assert not job.recorded(journal.Decided)
    assert job.last(journal.NodeLeft).node == 1
    assert job.sent(p.FormGeneration)


# ---- checkpoints


def sharded() -> Moving:
    """Return a job of two nodes with two shards, with a prepared move and an order to commit."""
    job = Moving.__new__(Moving)
    Driver.__init__(job, nodes=2, processes=2)
    job.start()
    for rank in job.ranks:
        job.arrive([rank], shard=rank % 2)
    job.ready(job.ranks)
    job.step(1)
    job.spare = job.hello(spare=True)
    job.drain()
    for shard in (0, 1):
        job.say(1, ShardReady(step=1, generation=1, shard=shard, shards=2, rank=2 + shard))
    for shard in (0, 1):
        job.say(1, ShardWritten(step=1, generation=1, shard=shard, shards=2))
    assert job.sent(p.Commit)
    for rank in (2, 3):
        job.tell(p.Spawned(ranks=(p.LiveRank(rank=rank, pid=900 + rank),), generation=2))
    for rank in (2, 3):
        job.tell(p.Arrived(rank=rank, generation=0, shard=rank % 2))
    return job


def test_a_node_that_commits_a_checkpoint_leaves_later() -> None:
    """The move waits until the node has committed its checkpoint."""
    job = sharded()
    assert not job.sent(p.PauseRequest)
    job.say(1, p.CheckpointWritten(step=1, generation=1, path="there", shards=2))
    assert job.sent(p.PauseRequest)


def test_a_commit_that_ends_with_the_agent() -> None:
    """The end of the job does not wait for the commit of an agent that a fault has dismissed."""
    job = sharded()
    job.machine.fleet.dismiss_agent(1, "a test", replaced=True)
    job.collect()
    assert job.machine.checkpoints.are_written is False  # the shards are still under way
    job.machine.checkpoints.assembly.begin(2)
    assert job.machine.checkpoints.are_written


def test_a_checkpoint_that_was_under_way_at_the_deadline() -> None:
    """Only a checkpoint of a later step ends the frequent checkpoints of a late move."""
    job = Moving(spares=0, checkpoint_every=50)
    job.drain(deadline_s=30.0)
    job.fire("move")
    job.say(0, p.CheckpointWritten(step=1, generation=1, path="older"))
    assert not job.sent(p.Settings)
    job.say(0, p.CheckpointWritten(step=2, generation=1, path="newer"))
    assert {each.message.checkpoint_every for each in job.sent(p.Settings)} == {50}


@pytest.mark.parametrize("written", [True, False])
def test_a_takeover_after_the_deadline(*, written: bool) -> None:
    """A new coordinator orders the checkpoint of a late move only if it is not written yet."""
    job = Moving(spares=0, checkpoint_every=50)
    job.drain(deadline_s=30.0)
    job.fire("move")
    if written:
        job.say(0, p.CheckpointWritten(step=3, generation=1, path="there"))
    job.lose_coordinator()
    job.fire("move")
    assert job.machine.fleet.settings.checkpoint_every == (50 if written else 1)
    assert len(job.recorded(journal.MoveLate)) == (1 if written else 2)


# ---- the rest


def test_the_cause_of_an_earlier_pause() -> None:
    """The first generation of a second Session does not have the cause of an earlier pause."""
    job = prepared()
    job.pause()
    job.take_place()
    job.ready(job.ranks)
    job.step(2)
    job.arrive(job.ranks, 3, done=True)
    assert job.sent(p.EndSession)
    job.arrive(job.ranks)
    assert [each.message.cause for each in job.sent(p.FormGeneration)] == [None, None]


def test_a_spare_of_an_ended_job() -> None:
    """A rank that ends on a spare after the job's end adds no event."""
    job = prepared()
    for rank in job.ranks:
        job.exits(rank, code=0)
    assert job.outcome
    job.tell(p.Exited(rank=1, pid=901, exit=Exit(signal=15), finished=0))
    assert isinstance(job.history[-1], journal.Ended)


@pytest.mark.parametrize("step", [1, 50])
def test_an_injection_outlasts_a_move(step: int) -> None:
    """The new process gets the order that the old one received for a later step."""
    job = Moving(allow_injection=True)
    order = Inject(rank=1, kind=InjectionKind.KILL, step=step)
    assert job.machine.injections.inject(order) == ""
    job.collect()
    job.drain()
    job.prepare()
    job.pause()
    job.take_place()
    job.ready([0])
    job.ready([1])
    assert [each.message for each in job.sent(Inject)] == [order]
