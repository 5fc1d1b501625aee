"""Limits: time limits, sources that fail, and stale messages."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.losses import ACTIVE_LOOKS, IDLE_LOOKS
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.recovery.faults.fault import Exit, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Strategy

# ---- time limits

EXPIRES_S = 2.0  # after that an agent calls a rank late


def test_a_rank_that_does_not_leave_its_step_is_replaced() -> None:
    """A healthy rank that does not leave its collective in time is killed and restarted."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([2], finished=5)
    job.fire("leave")
    assert job.sent_by_node(p.Kill) == {0: p.Kill(ranks=(1,), grace_s=0.0)}
    job.killed()
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.PEER, 2: StateSource.SELF}
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.STUCK


def look(job: Driver, *active: int) -> None:
    """Let the agents look at ranks, of which these are active, and let the next limit expire."""
    answer(job, job.sent_by_node(p.InspectRanks), *active)
    job.fire("join")


def answer(job: Driver, orders: dict[int, p.InspectRanks], *active: int) -> None:
    """Let the agents answer the orders to look at their ranks, of which these are active."""
    for node, order in orders.items():
        own = [rank for rank in job.ranks if job.node_of(rank) == node and rank in job.pids]
        results = tuple(
            p.RankInspection(
                rank=rank,
                finished=0,
                doing=RankActivity.OUTSIDE,
                elapsed_s=1.0,
                limit_s=EXPIRES_S,
                busy=rank in active,
            )
            for rank in own
        )
        job.say(node, p.RanksInspected(serial=order.serial, looks=results))


def idle(job: Driver) -> None:
    """Let the limit expire, and let all looks find that the ranks do nothing."""
    job.fire("join")
    for _ in range(IDLE_LOOKS):
        look(job)


def test_a_started_rank_that_loads_for_long_is_left_alone() -> None:
    """A rank that computes or reads is not late; one that then does nothing is replaced."""
    job = Driver(processes=2)
    job.start()
    job.arrive([1])
    job.fire("join")
    for _ in range(20):  # each look, and the pause after it
        look(job, 0)
        assert not job.sent_by_node(p.Kill)
        job.fire("join")
    for _ in range(IDLE_LOOKS):
        assert not job.sent_by_node(p.Kill)
        look(job)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)
    assert "within 600 s, and does nothing" in job.last(journal.FaultSeen).fault.message


def test_a_rank_that_is_active_for_too_long_is_replaced() -> None:
    """An endless loop before the Session looks like work, so its time is limited as well."""
    job = Driver(processes=2)
    job.start()
    job.arrive([1])
    job.fire("join")
    for _ in range(ACTIVE_LOOKS - 1):
        look(job, 0)
        job.fire("join")
    look(job, 0)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)
    assert "although it is active" in job.last(journal.FaultSeen).fault.message


def test_ranks_that_wait_for_one_that_loads_its_state_are_left_alone() -> None:
    """While a rank reads its state from a slow store, the other ranks do nothing."""
    job = Driver(processes=2)
    job.start()
    job.arrive(job.ranks)
    job.fire("join")
    for _ in range(10):
        look(job, 1)
        job.fire("join")
    assert job.phase is Phase.RESTORING
    job.ready(job.ranks)
    assert job.phase is Phase.TRAINING


def test_the_limit_begins_with_the_first_rank_that_arrives() -> None:
    """If all ranks load for longer than the limit, it begins again when the first one arrives."""
    job = Driver(processes=2)
    job.start()
    job.fire("join")
    assert "join" not in job.timers
    job.arrive([1])
    idle(job)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)


def test_a_node_that_answers_a_look_late_is_not_idle() -> None:
    """A look waits for late answers. A look without an answer does not count as idle."""
    job = Driver(processes=2)
    job.start()
    job.arrive([1])
    job.fire("join")
    for _ in range(IDLE_LOOKS):
        orders = job.sent_by_node(p.InspectRanks)
        job.fire("join")
        assert not job.sent_by_node(p.InspectRanks)
        answer(job, orders, 0)
        job.fire("join")
        assert not job.sent_by_node(p.Kill)
        job.fire("join")
    for _ in range(IDLE_LOOKS):
        look(job)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)


@pytest.mark.parametrize("error", ["", "no file descriptors"])
def test_a_node_that_never_shows_its_ranks_has_a_limit(error: str) -> None:
    """Its rank may be active, so it has the time of an active rank, and then it is replaced."""
    job = Driver(processes=2)
    job.start()
    job.arrive([1])
    job.fire("join")
    for _ in range(ACTIVE_LOOKS):
        assert not job.sent_by_node(p.Kill)
        for node, order in job.sent_by_node(p.InspectRanks).items():
            if error:
                job.say(node, p.RanksInspected(serial=order.serial, looks=(), error=error))
        job.fire("join")
        job.fire("join")
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)
    assert "looks got no answer about it" in job.last(journal.FaultSeen).fault.message


def test_a_coordinator_takes_over_with_a_rank_before_its_session() -> None:
    """The rank has a limit, as before: it is replaced if it does nothing."""
    job = trained(5)
    job.exits(1, signal=SIGKILL, finished=5)
    job.spawned()
    job.lose_coordinator()
    live = (
        p.LiveRank(rank=0, pid=job.pids[0], training=True),
        p.LiveRank(rank=1, pid=job.pids[1]),
    )
    job.hello(0, ranks=live, generation=1)
    job.store_up() if job.stores else None
    job.arrive([0], finished=5)
    idle(job)
    assert job.sent_by_node(p.Kill)[0].ranks == (1,)


def test_a_started_rank_that_does_not_reach_its_session_is_replaced() -> None:
    """A rank that does not reach its Session in time, and does nothing, is killed and restarted."""
    job = Driver(processes=2)
    job.train(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=5)
    idle(job)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)
    job.killed()
    assert job.spawned_now() == [0]
    assert "join" in job.timers


def test_a_rank_that_does_not_get_its_state_in_time() -> None:
    """A transfer that exceeds the time limit ends the generation. The next one may succeed."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([1, 2])
    idle(job)
    assert job.sent_by_node(p.GenerationEnded)[0].generation == 2
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    assert job.sent_by_node(p.FormGeneration)[0].generation == 3
    job.ready(job.ranks)
    assert job.phase is Phase.TRAINING


def test_a_rank_that_ends_well_while_it_should_take_its_state() -> None:
    """If a rank exits with status 0 during restore, its broken collective shows the cause.

    The time limit finds no cause.
    """
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([1, 2])
    job.exits(0, code=0)
    job.fire("join")
    assert not job.commands
    job.fail_step(1)
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_time_limits_are_off_while_ranks_train() -> None:
    """The time limits of a regroup end with the regroup."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    assert {"leave", "join"} <= job.timers.keys()
    job.arrive([0])
    job.arrive([1], finished=5)
    job.ready(job.ranks)
    assert not {"leave", "join"} & job.timers.keys()


# ---- sources that fail


def test_a_snapshot_that_cannot_be_used_is_passed_over_for_the_checkpoint() -> None:
    """If a snapshot is broken, the next plan takes the checkpoint."""
    job = trained(12)
    job.say(0, p.Snapshots(kept={0: ((10, 1),)}))
    job.say(0, p.CheckpointWritten(step=8, generation=1, path="there"))
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive(job.ranks)
    assert sources(job)[0] is StateSource.SNAPSHOT
    job.ready([0], error="snapshot of step 10: checksum is wrong")
    assert job.sent_by_node(p.GenerationEnded)
    assert job.last(journal.Decided).outweighed
    assert journal.incidents(job.history)[-1].strategies[-1] is Strategy.RECOVER_IN_PLACE
    job.arrive(job.ranks)
    assert sources(job) == {0: StateSource.CHECKPOINT, 1: StateSource.CHECKPOINT}
    assert job.last(journal.Formed).step == 8
    job.ready(job.ranks)
    job.step(9)
    assert journal.incidents(job.history)[-1].steps_lost == 4


def test_the_copies_before_are_tried_one_after_the_other() -> None:
    """A failed source excludes only that step of that kind of source, and only on its node."""
    job = Driver(nodes=2, processes=1)
    job.hello(0, checkpoints=((8, 0), (4, 0)))
    job.hello(1, checkpoints=((8, 0), (2, 0)))
    job.store_up()
    job.spawned()
    job.arrive(job.ranks)
    assert job.last(journal.Formed).step == 8
    job.ready([0], error="a file is damaged")
    job.arrive([0])
    job.arrive([1], finished=8)
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.SELF}
    job.ready([1])
    job.ready([0])
    job.step(9)
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=9)
    job.spawned()
    job.arrive(job.ranks)
    assert job.last(journal.Formed).step == 8
    job.ready([0], error="a file is damaged")
    job.arrive(job.ranks)
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.CHECKPOINT}
    job.ready([1], error="a file is damaged")
    job.arrive(job.ranks)
    assert sources(job) == {0: StateSource.CHECKPOINT, 1: StateSource.PEER}
    assert job.last(journal.Formed).step == 4


def test_a_source_that_failed_may_be_used_in_the_next_incident() -> None:
    """After training has resumed, a new incident may use the failed kind of source again.

    A newer snapshot is then available.
    """
    job = trained(12, processes=1)
    job.say(0, p.Snapshots(kept={0: ((10, 1),)}))
    job.exits(0, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive([0])
    job.ready([0], error="broken")
    job.form()
    assert job.last(journal.Formed).sources == {"fresh": 1}
    job.step(1)
    job.say(0, p.Snapshots(kept={0: ((20, 1),)}))
    job.exits(0, signal=SIGKILL, finished=21)
    job.spawned()
    job.arrive([0])
    assert sources(job) == {0: StateSource.SNAPSHOT}


def test_a_checkpoint_that_cannot_be_written_does_not_disturb_training() -> None:
    """A checkpoint that cannot be written is an incident of its own, which closes immediately."""
    job = trained(5)
    job.say(0, p.CheckpointWritten(step=5, generation=1, error="no space left on device"))
    assert job.phase is Phase.TRAINING
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert "no space left" in incident.reason


# ---- stale messages


def test_the_exit_of_an_earlier_process_changes_nothing() -> None:
    """An exit with the pid of an earlier process is ignored."""
    job = trained(5)
    job.say(0, p.Exited(rank=0, pid=99, exit=Exit(signal=SIGKILL), finished=5))
    assert not job.commands
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize(
    "message",
    [
        p.StepFailed(rank=0, generation=1, kind=FaultKind.LINK, error="reset by peer", finished=99),
        p.StateReady(rank=0, generation=1, finished=99),
        p.StateReady(rank=0, generation=1, finished=99, error="nothing there"),
        p.StepDone(rank=0, generation=1, finished=99),
        p.StoreUp(serial=0, port=1),
        p.StoreDown(serial=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_news_of_an_earlier_generation_changes_nothing(message: p.Message) -> None:
    """Messages about an earlier generation or store change nothing."""
    job = trained(5)
    job.fail_step(0)
    job.arrive(job.ranks, finished=5)
    assert job.machine.job.generation == 2
    before = job.phase, job.machine.job.newest, [job.status(rank) for rank in job.ranks]
    job.say(0, message)
    assert not job.commands
    assert before == (job.phase, job.machine.job.newest, [job.status(rank) for rank in job.ranks])


def test_the_end_of_an_earlier_store_changes_nothing() -> None:
    """The end of a replaced store is ignored, and the new store still counts."""
    job = trained(5)
    job.say(0, p.StoreDown(serial=1))
    job.exits(0, signal=SIGKILL, finished=5)
    job.store_up()
    job.say(0, p.StoreDown(serial=1))
    job.exits(1, signal=SIGKILL, finished=5)
    assert not job.sent_by_node(p.HostStore)
    assert job.spawned_now() == [1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attempt": 3}, "attempt"),
        ({"job_id": "another"}, "job"),
        ({"version": 0}, "wire version"),
        ({"processes": 7}, "processes per node"),
        ({"node": 5}, "does not exist"),
        ({"node": 0}, "another agent is node 0"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused(changes: dict[str, object], word: str) -> None:
    """An agent that does not match the job is refused with the reason. The job does not change."""
    job = Driver(nodes=2)
    job.hello(0)
    node = changes.pop("node", 1)
    job.hello(node, **changes)
    assert word in job.refusals()[-1]
    assert list(job.machine.job.roster.nodes) == [0]


def test_agents_without_a_wish() -> None:
    """Agents that request no node get the free nodes. Further agents become spares."""
    job = Driver(nodes=2)
    job.hello()
    job.hello()
    assert sorted(job.machine.job.roster.nodes) == [0, 1]
    job.hello()
    assert not job.refusals()
    assert len(job.machine.job.roster.spares) == 1


def test_no_agent_is_taken_in_by_a_job_that_ends() -> None:
    """A job that ends refuses new agents, so that they end."""
    job = trained(5)
    job.stop()
    job.hello(0)
    assert job.refusals()[-1] == "the job is ending"
