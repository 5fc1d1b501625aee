"""The machine, when a rank tells late that what all have made since may be wrong."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from jobs import elastic
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

CLEAN = 7


def at(*steps: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """Snapshots of rank 0, made in the first generation."""
    return {0: tuple((step, 1) for step in steps)}


def take_over(job: Driver, **hello: Any) -> None:
    """The coordinator dies, and the agent tells another one what it has."""
    job.lose_coordinator()
    alive = tuple(p.LiveRank(rank=r, pid=job.pids[r], training=True) for r in job.ranks)
    job.hello(0, generation=1, ranks=alive, **hello)


def suspected(*snapshots: int, checkpoints: tuple[int, ...] = ()) -> Driver:
    """Two ranks have finished step 9 when one says that it may be wrong from step 8 on."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(*snapshots)))
    for step in checkpoints:
        job.say(0, p.CheckpointWritten(step=step, generation=1, path="there"))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    return job


def arrive(job: Driver) -> None:
    """Rank 0 has what it had; the device of rank 1 was repaired, and has nothing."""
    job.arrive([0], finished=9, made=1)
    job.arrive([1], finished=9, torn=True)


def test_all_go_back_to_what_is_clean() -> None:
    """A replica that lives, and a newer snapshot, are passed over; every process stays."""
    job = suspected(6, 8)
    assert strategies(job) == [Strategy.RETRY]
    assert "after step 7 may be wrong on all ranks" in job.last(journal.Decided).reason
    arrive(job)
    assert sources(job) == {0: StateSource.SNAPSHOT, 1: StateSource.PEER}
    assert job.told(p.FormGeneration)[0].step == 6
    assert not job.doomed
    job.ready(job.ranks)
    job.step(7)
    (incident,) = journal.incidents(job.history)
    assert incident.steps_lost == 3
    assert job.recorded(journal.Suspected) == [
        journal.Suspected(seq=ANY, at=ANY, generation=1, clean=CLEAN, rank=1)
    ]


def test_a_checkpoint_that_is_suspect() -> None:
    """It is passed over for an older one, and in later incidents as well."""
    job = suspected(checkpoints=(4, 8))
    arrive(job)
    assert set(sources(job).values()) == {StateSource.CHECKPOINT}
    assert job.last(journal.Formed).step == 4
    job.ready(job.ranks)
    job.step(5)
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive(job.ranks)
    assert job.last(journal.Formed).step == 4


def test_nothing_is_clean() -> None:
    """Only new processes have the state that the script builds."""
    job = suspected(8, checkpoints=(8,))
    arrive(job)
    assert job.doomed == [0, 1]
    job.killed()
    job.spawned()
    job.arrive(job.ranks)
    assert set(sources(job).values()) == {StateSource.FRESH}


def test_what_was_made_anew_is_clean() -> None:
    """The next fault is answered from the replica that lives."""
    job = suspected(6)
    arrive(job)
    job.ready(job.ranks)
    job.step(9)
    job.exits(1, signal=SIGKILL, finished=9)
    job.spawned()
    job.arrive([1])
    job.arrive([0], finished=9, made=2)
    assert sources(job) == {0: StateSource.SELF, 1: StateSource.PEER}
    assert job.last(journal.Formed).step == 9


def test_a_rank_that_did_not_come_to_take_its_state() -> None:
    """It was in the next generation, but its state is still that of before."""
    job = suspected(6)
    arrive(job)
    job.fail_step(0)
    job.arrive([0], finished=9, made=1)
    job.arrive([1], finished=9, torn=True)
    assert job.last(journal.Formed).step == 6


def test_another_coordinator_knows_what_is_suspect() -> None:
    """The journal tells it, whatever the agents still have."""
    job = suspected(6, 8, checkpoints=(8,))
    take_over(job, snapshots=at(6, 8), checkpoints=((8, 1),))
    arrive(job)
    job.store_up()
    assert job.last(journal.Formed).step == 6


def test_a_coordinator_that_did_not_hear_it() -> None:
    """The rank says it again when it arrives at the next one."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6, 8)))
    take_over(job, snapshots=at(6, 8))
    job.arrive([0], finished=9, made=1)
    job.arrive([1], finished=9, made=1, clean=CLEAN)
    job.store_up()
    assert job.last(journal.Formed).step == 6
    assert len(job.recorded(journal.Suspected)) == 1


@pytest.mark.parametrize(("clean", "kept"), [(CLEAN, True), (None, False)])
def test_what_an_agent_tells_the_next_coordinator(clean: int | None, kept: bool) -> None:
    """That a step failed is over with its generation; that states are wrong is not."""
    failed = p.StepFailed(
        rank=1, generation=1, kind=FaultKind.DEVICE_MEMORY, error="ECC", finished=9, clean=clean
    )
    assert failed.lasting == kept


def test_snapshots_that_come_behind_the_hello() -> None:
    """They are named by the generation that made them, whatever was formed since."""
    job = suspected(6, 8)
    arrive(job)
    take_over(job, snapshots=at(6, 8))  # the order of generation 2 never reached it
    job.say(0, p.Snapshots(kept=at(6, 8)))
    job.arrive([0], finished=9, made=1, generation=1)
    job.arrive([1], finished=9, torn=True, generation=1)
    job.store_up()
    assert job.last(journal.Formed).step == 6
    job.stop()
    job.killed()
    (order,) = job.told(p.WriteFinalCheckpoint).values()
    assert (order.step, order.made, order.suspicions) == (6, 1, ((1, CLEAN),))


@pytest.mark.parametrize("ends", ["restart", "stuck"])
def test_a_rank_that_is_being_ended(ends: str) -> None:
    """What it says of the state is heard, though nothing is done for it any more."""
    job = trained(9, policy=Policy(max_restarts=1))
    job.say(0, p.Snapshots(kept=at(6, 8)))
    if ends == "restart":
        job.raises(0, "RuntimeError: the loss is no number")
    else:
        job.fail_step(0)
        job.arrive([0], finished=9, made=1)
        job.fire("leave")
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    job.killed()
    if ends == "restart":
        job.store_up()
    job.spawned()
    job.arrive(job.ranks if ends == "restart" else [1])
    assert job.last(journal.Formed).step == 6


def test_a_job_that_is_being_stopped() -> None:
    """Its the final checkpoint is clean."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6, 8)))
    job.stop()
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    job.killed()
    assert job.told(p.WriteFinalCheckpoint)[0].step == 6


def test_the_end_of_training() -> None:
    """With a state that may be wrong no rank is let go."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6)))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    job.arrive(job.ranks, finished=9, done=True)
    assert not job.told(p.Dismiss)
    assert job.last(journal.Formed).step == 6


def test_a_node_on_trial() -> None:
    """It is put out for its fault; what it has said is in the journal."""
    job = elastic.grown()
    job.ready(job.ranks)
    job.step_of([0, 1, 2, 4, 5], 10)
    job.fail_step(2, kind=FaultKind.DEVICE_MEMORY, clean=9)
    assert [(event.rank, event.clean) for event in job.recorded(journal.Suspected)] == [(2, 9)]


def test_a_node_that_the_world_goes_on_without() -> None:
    """What its agent keeps of before counts no more than what others have."""
    job = Driver(nodes=2, processes=1, least=1)
    job.train(5)
    job.lose(1)  # its line was cut; agent and snapshots live on
    job.arrive([0], finished=9, made=1)
    job.ready([0])
    job.step_of([0], 10)
    job.say(0, p.Snapshots(kept={0: ((6, 1), (10, 2))}))
    job.pids[1] = 901
    alive = (p.LiveRank(rank=1, pid=901, training=True),)
    job.hello(1, generation=1, ranks=alive, snapshots={1: ((6, 1), (8, 1))})
    job.fail_step(0, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    job.arrive([0], finished=10, made=2)
    assert job.last(journal.Formed).step == 6
    job.say(0, p.Snapshots(kept=at(6)))
    job.ready([0])
    job.step_of([0], 7)
    job.stop()
    job.killed()
    assert {order.step for order in job.told(p.WriteFinalCheckpoint).values()} == {6}


def test_a_rank_outside_that_comes_to_say_it() -> None:
    """The world that trains on with such a state goes back."""
    job = Driver(nodes=2, processes=1, least=1)
    job.train(9)
    job.say(0, p.Snapshots(kept=at(6)))
    job.lose(1)
    job.arrive([0], finished=9, made=1)
    job.ready([0])
    job.step_of([0], 10)
    job.pids[1] = 901
    alive = (p.LiveRank(rank=1, pid=901, training=True),)
    job.hello(1, generation=1, ranks=alive)
    said = {"generation": 1, "made": 1, "clean": CLEAN}
    job.arrive([1], finished=9, **said)
    assert set(job.told(p.GenerationEnded)) == {0}
    job.arrive([0], finished=10, made=2)
    assert job.last(journal.Formed).step == 6


def test_final_checkpoint_are_clean() -> None:
    """Neither a suspect snapshot nor a suspect checkpoint counts."""
    job = trained(9)
    job.say(
        0,
        p.Snapshots(
            kept={
                0: (
                    (6, 1),
                    (8, 1),
                )
            }
        ),
    )
    job.say(0, p.CheckpointWritten(step=8, generation=1, path="there"))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, clean=CLEAN)
    job.raises(0)
    job.killed()
    (order,) = job.told(p.WriteFinalCheckpoint).values()
    assert (order.step, order.made, order.suspicions) == (6, 1, ((1, CLEAN),))
