"""Losses while the ranks of a Session do not train: before they meet, and after the last step."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.job.spec import Framework
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import RESTARTS_APART, Policy, Strategy


def starts(**world: Any) -> Driver:
    """Return a job whose ranks run a script that imports Rekindle. None has reached its Session."""
    job = Driver(**world)
    for node in range(job.machine.job.spec.nodes):
        job.hello(node, session=True)
    job.store_up()
    job.spawned()
    return job


def restart(job: Driver) -> None:
    """End all ranks and start them again."""
    job.killed()
    assert job.phase is Phase.GATHERING
    job.store_up()
    job.spawned()


def train(job: Driver) -> None:
    """Let all ranks meet, and do a step. Check that the job trains."""
    job.form()
    job.step(1)
    assert job.phase is Phase.TRAINING
    assert all(incident.closed for incident in journal.incidents(job.history))


# ---- before any rank has reached its Session


@pytest.mark.parametrize("victim", range(4))
def test_a_rank_is_killed_before_any_rank_has_reached_its_session(victim: int) -> None:
    """All ranks restart, also without a restart in the policy."""
    job = starts(nodes=2)
    job.exits(victim, signal=SIGKILL)
    assert strategies(job) == [Strategy.RESTART]
    assert "because they do not train together (restart 1 of 3" in job.last(journal.Decided).reason
    restart(job)
    train(job)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_is_lost_before_any_rank_has_reached_its_session(node: int, spares: int) -> None:
    """A spare or a new agent becomes the node, and all ranks restart."""
    job = starts(nodes=2, spares=spares)
    spare = job.hello(spare=True) if spares else 0
    job.lose(node)
    assert strategies(job) == [Strategy.RESTART]
    job.killed()
    if spares:
        assert job.promotions == [(spare, node)]
        job.hello_again(spare, node, spare=True, session=True)
    else:
        assert job.last(journal.NodeWanted).node == node
        job.hello(node, session=True)
    job.store_up()
    job.spawned()
    train(job)


def test_each_restart_before_the_first_step_counts() -> None:
    """The job fails after a fixed number of them, and takes the restarts of the policy first."""
    job = starts(policy=Policy(max_restarts=1))
    for _ in range(RESTARTS_APART + 1):
        job.exits(0, signal=SIGKILL)
        restart(job)
    job.exits(0, signal=SIGKILL)
    job.killed()
    assert strategies(job) == [Strategy.RESTART] * (RESTARTS_APART + 1) + [Strategy.FAIL]
    assert [each.apart for each in job.recorded(journal.Decided)][:4] == [True] * 3 + [False]
    assert job.outcome is False


def test_a_finished_step_renews_the_restarts_before_the_first_step() -> None:
    """Restarts in the start of a job do not count in the start of a later restart."""
    job = starts(policy=Policy(max_restarts=1))
    for _ in range(RESTARTS_APART):
        job.exits(0, signal=SIGKILL)
        restart(job)
    train(job)
    job.raises(0)
    restart(job)
    job.exits(1, signal=SIGKILL)
    assert job.last(journal.Decided).apart
    restart(job)
    train(job)


def test_a_coordinator_that_takes_over_counts_the_restarts_before() -> None:
    """The number of restarts follows from the journal."""
    job = starts()
    for _ in range(RESTARTS_APART):
        job.exits(0, signal=SIGKILL)
        restart(job)
    job.lose_coordinator()
    live = tuple(p.LiveRank(rank=rank, pid=job.pids[rank]) for rank in job.ranks)
    job.hello(0, session=True, restart=RESTARTS_APART, ranks=live)
    job.exits(1, signal=SIGKILL)
    assert strategies(job)[-1] is Strategy.FAIL


def test_the_incident_of_a_script_that_never_has_a_session_closes() -> None:
    """A script may import Rekindle without a Session: all its ranks run again."""
    job = starts()
    job.exits(0, signal=SIGKILL)
    restart(job)
    assert all(incident.closed for incident in journal.incidents(job.history))
    for rank in job.ranks:
        job.exits(rank, code=0)
    assert job.outcome is True


def test_a_coordinator_takes_over_while_trained_ranks_restart() -> None:
    """It knows that the script has a Session, so the incident closes when the ranks train."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.raises(0)
    job.killed()
    assert job.phase is Phase.GATHERING
    job.lose_coordinator()
    job.hello(0)
    job.store_up()
    job.spawned()
    assert not journal.incidents(job.history)[-1].closed
    train(job)


def test_an_error_of_the_script_in_the_start_is_final() -> None:
    """An exception of the script uses the restarts of the policy, as at any other time."""
    job = starts()
    job.raises(1)
    job.killed()
    assert job.outcome is False


@pytest.mark.parametrize("ranks", ["one", "all"])
def test_memory_that_ran_out_in_the_start_is_final(ranks: str) -> None:
    """The next process of a rank without memory would need as much memory."""
    job = starts()
    exited = p.Exited(
        rank=0, pid=job.pids.pop(0), exit={"signal": SIGKILL}, finished=0, no_memory=True
    )
    if ranks == "all":
        job.arrive([1])
    job.say(0, exited)
    assert strategies(job) == [Strategy.FAIL]


def test_a_script_that_does_not_import_rekindle_is_not_restarted() -> None:
    """Nothing shows when the ranks of another script have met, so the policy alone decides."""
    job = Driver()
    job.start()
    job.exits(0, signal=SIGKILL)
    assert strategies(job) == [Strategy.FAIL]


def test_mindspore_restarts_all_ranks() -> None:
    """A new MindSpore process cannot join others, so all ranks restart, also if one waits."""
    job = starts(framework=Framework.MINDSPORE)
    job.arrive([0])
    job.exits(1, signal=SIGKILL)
    assert strategies(job) == [Strategy.RESTART]
    restart(job)
    train(job)


# ---- some ranks wait for the first generation


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_is_killed_while_another_one_waits(victim: int, known: bool) -> None:
    """Only the rank restarts, also if the script does not import Rekindle."""
    job = starts(nodes=2) if known else Driver(nodes=2)
    if not known:
        job.start()
    job.arrive([1])
    job.exits(victim, signal=SIGKILL)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    assert job.spawned_now() == [victim]
    job.spawned()
    job.arrive([rank for rank in job.ranks if rank != 1])
    assert set(sources(job).values()) == {StateSource.FRESH}
    job.ready(job.ranks)
    job.step(1)
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_is_lost_while_a_rank_waits(node: int) -> None:
    """A new agent becomes the node, and the rank continues to wait."""
    job = starts(nodes=2)
    job.arrive([3 - 2 * node])
    job.lose(node)
    assert strategies(job) == [Strategy.RECOVER]
    job.hello(node, session=True)
    if node == 0:
        job.store_up()
    job.spawned()
    train(job)


def test_a_killed_rank_resumes_from_the_checkpoint() -> None:
    """A rank that restarts before all ranks have met takes the state of the checkpoint."""
    job = Driver()
    job.hello(0, session=True, checkpoints=((7, 1),))
    job.store_up()
    job.spawned()
    job.arrive([0])
    job.exits(1, signal=SIGKILL)
    job.spawned()
    job.arrive([1])
    assert set(sources(job).values()) == {StateSource.CHECKPOINT}
    assert job.last(journal.Formed).step == 7


def test_the_same_rank_is_killed_again_and_again() -> None:
    """A rank restarts three times on its node and once on another one. Then all ranks restart."""
    job = starts(nodes=2)
    job.arrive([0])
    for _ in range(3):
        job.exits(3, signal=SIGKILL)
        job.spawned()
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE] * 3
    job.exits(3, signal=SIGKILL)
    assert strategies(job)[-1] is Strategy.RECOVER


# ---- after the last step


def done(**world: Any) -> Driver:
    """Return a job whose ranks have finished all steps of their Session, and still run."""
    job = trained(9, **world)
    job.arrive(job.ranks, finished=10, done=True)
    return job


def test_a_node_is_lost_whose_ranks_have_ended() -> None:
    """The job succeeds when the other ranks end: the work of the node is done."""
    job = done(nodes=2)
    for rank in (2, 3):
        job.exits(rank, code=0, finished=10)
    job.lose(1)
    assert not journal.incidents(job.history)
    for rank in (0, 1):
        job.exits(rank, code=0, finished=10)
    assert job.outcome is True


def test_a_node_of_a_script_without_a_session_is_lost_whose_ranks_have_ended() -> None:
    """The same applies to a script without a Session."""
    job = Driver(nodes=2, processes=1)
    job.start()
    job.exits(1, code=0)
    job.lose(1)
    job.exits(0, code=0)
    assert job.outcome is True


def test_a_checkpoint_is_lost_with_a_node_whose_ranks_have_ended() -> None:
    """The job succeeds, and its incidents name the checkpoint that is lost."""
    job = done(nodes=2)
    for node in (0, 1):
        ready = p.ShardReady(
            step=10, generation=job.machine.job.generation, shard=node, shards=2, rank=2 * node
        )
        job.say(node, ready)
    for rank in job.ranks:
        job.exits(rank, code=0, finished=10)
    assert job.outcome is None
    job.lose(1)
    assert job.outcome is True
    text = "writing the checkpoint of step 10 failed: its node is lost"
    assert job.last(journal.CheckpointFailed).fault.message == text


def test_a_rank_is_killed_after_the_last_step() -> None:
    """All ranks restart from the newest state, because the rest of the script is not done."""
    job = done()
    job.exits(0, code=0, finished=10)
    job.exits(1, signal=SIGKILL, finished=10)
    assert strategies(job) == [Strategy.RESTART]
    assert "training is over" in job.last(journal.Decided).reason
    restart(job)
    train(job)


def test_a_node_is_lost_after_the_last_step() -> None:
    """Another agent becomes the node, and all ranks restart."""
    job = done(nodes=2)
    job.lose(1)
    assert strategies(job) == [Strategy.RESTART]
    job.killed()
    job.hello(1)
    job.store_up()
    job.spawned()
    train(job)


def test_a_coordinator_takes_over_after_the_last_step() -> None:
    """It knows from the journal that the others have no Session in which a new rank could wait."""
    job = done()
    job.lose_coordinator()
    live = tuple(p.LiveRank(rank=rank, pid=job.pids[rank]) for rank in job.ranks)
    job.hello(0, session=True, generation=1, ranks=live)
    job.exits(1, signal=SIGKILL, finished=10)
    assert strategies(job)[-1] is Strategy.RESTART


# ---- stopped ranks


def stopped(job: Driver, rank: int) -> None:
    """Let the agent report that a signal has stopped a rank."""
    generation = job.machine.job.generation
    job.say(job.node_of(rank), p.RankStalled(rank=rank, generation=generation, stopped=True))


def test_a_rank_is_stopped_before_any_rank_has_reached_its_session() -> None:
    """All ranks restart, once, however often the agent reports the rank."""
    job = starts()
    stopped(job, 1)
    assert strategies(job) == [Strategy.HANG_RESTART]
    stopped(job, 1)
    assert len(strategies(job)) == 1
    restart(job)
    train(job)


def test_a_rank_is_stopped_while_others_wait() -> None:
    """Only the stopped rank restarts."""
    job = starts()
    job.arrive([0])
    stopped(job, 1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.killed()
    job.spawned()
    train(job)


def test_a_rank_is_stopped_while_it_takes_its_state() -> None:
    """The rank restarts, and all ranks form the next generation."""
    job = starts()
    job.arrive(job.ranks)
    assert job.phase is Phase.RESTORING
    job.ready([0])
    stopped(job, 1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.killed()
    job.arrive([0], 0)
    job.store_up() if job.stores else None
    job.spawned()
    train(job)


def test_a_rank_is_stopped_again_after_it_restarted() -> None:
    """The stop of the next process is a fault of its own, also before a generation is formed."""
    job = starts()
    job.arrive([0])
    for _ in range(2):
        stopped(job, 1)
        job.killed()
        job.spawned()
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE] * 2
    train(job)


def test_a_rank_stays_stopped_while_a_decision_waits_for_a_user() -> None:
    """The agent reports the rank again and again, and it stays one fault with one decision."""
    job = trained(5, nodes=2, policy=Policy(approve=(Strategy.RECOVER,)))
    job.lose(1)
    for _ in range(5):
        stopped(job, 0)
    hangs = [e for e in job.recorded(journal.FaultSeen) if e.fault.kind is FaultKind.HANG]
    assert len(hangs) == 1
    incident = job.machine.job.incidents.open
    job.machine.recovery.approve(p.Approval(incident=incident, granted=True, by="ann"))
    job.collect()
    assert strategies(job) == [Strategy.RECOVER, Strategy.RECOVER_IN_PLACE]


def test_a_user_is_asked_once_about_a_rank_that_stays_stopped() -> None:
    """The same applies if the decision about the stopped rank itself waits."""
    job = starts(policy=Policy(approve=(Strategy.HANG_RESTART,)))
    for _ in range(5):
        stopped(job, 0)
    assert len(job.recorded(journal.FaultSeen)) == 1
    assert not job.machine.job.incidents.held


def test_a_rank_is_stopped_in_the_start_of_a_job_without_hang_restart() -> None:
    """All ranks restart as after the loss of a rank, and then with the policy's restarts."""
    job = starts(policy=Policy(strategies=(Strategy.RESTART,), max_restarts=1))
    for _ in range(RESTARTS_APART + 1):
        stopped(job, 0)
        restart(job)
    stopped(job, 0)
    assert strategies(job) == [Strategy.RESTART] * (RESTARTS_APART + 1) + [Strategy.FAIL]
    assert [each.apart for each in job.recorded(journal.Decided)][:4] == [True] * 3 + [False]


def test_a_stopped_rank_of_another_script_or_in_training_is_left_to_other_rules() -> None:
    """A script without a Session may be stopped on purpose; in training an inspection decides."""
    job = Driver()
    job.start()
    stopped(job, 1)
    assert not strategies(job)
    job = trained(5)
    stopped(job, 1)
    assert not strategies(job)


# ---- other kinds of losses


def test_a_node_that_is_unhealthy_in_the_start_is_replaced() -> None:
    """A fault of a node that still has its agent also moves its ranks to another node."""
    job = starts(nodes=2)
    fault = job.machine.job.fault(
        FaultKind.NODE, job.machine.job.roster.ranks[2], "its switch has failed"
    )
    job.machine.recovery.report(fault)
    job.collect()
    assert strategies(job) == [Strategy.RESTART]
    assert job.last(journal.NodeLeft).node == 1
    assert job.last(journal.Isolated).node == 1
