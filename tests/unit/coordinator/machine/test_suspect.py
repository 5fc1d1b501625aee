"""A rank that reports late that all states since a step may be wrong."""

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
    """Return snapshots of rank 0 from the first generation."""
    return {0: tuple((step, 1) for step in steps)}


def take_over(job: Driver, **hello: Any) -> None:
    """Replace the coordinator, and let the agent report to the new one."""
    job.lose_coordinator()
    alive = tuple(p.LiveRank(rank=r, pid=job.pids[r], training=True) for r in job.ranks)
    job.hello(0, generation=1, ranks=alive, **hello)


def suspected(*snapshots: int, checkpoints: tuple[int, ...] = ()) -> Driver:
    """Return a job at step 9 in which rank 1 reports that states from step 8 may be wrong."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(*snapshots)))
    for step in checkpoints:
        job.say(0, p.CheckpointWritten(step=step, generation=1, path="there"))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    return job


def arrive(job: Driver) -> None:
    """Let rank 0 arrive with its state, and rank 1 without a state after a repair of its device."""
    job.arrive([0], finished=9, state_generation=1)
    job.arrive([1], finished=9, torn=True)


def test_all_go_back_to_what_is_clean() -> None:
    """All ranks return to the newest clean snapshot, and every process continues.

    A live replica and a newer snapshot that may be wrong do not count.
    """
    job = suspected(6, 8)
    assert strategies(job) == [Strategy.RETRY]
    assert "after step 7 may be wrong on all ranks" in job.last(journal.Decided).reason
    arrive(job)
    assert sources(job) == {0: StateSource.SNAPSHOT, 1: StateSource.PEER}
    assert job.sent_by_node(p.FormGeneration)[0].step == 6
    assert not job.doomed
    job.ready(job.ranks)
    job.step(7)
    (incident,) = journal.incidents(job.history)
    assert incident.steps_lost == 3
    assert job.recorded(journal.Suspected) == [
        journal.Suspected(seq=ANY, at=ANY, generation=1, valid_steps=CLEAN, rank=1)
    ]


def test_a_checkpoint_that_is_suspect() -> None:
    """A checkpoint that may be wrong does not count, also in later incidents."""
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
    """If no state is clean, new processes start with the script's initial state."""
    job = suspected(8, checkpoints=(8,))
    arrive(job)
    assert job.doomed == [0, 1]
    job.killed()
    job.spawned()
    job.arrive(job.ranks)
    assert set(sources(job).values()) == {StateSource.FRESH}


def test_what_was_made_anew_is_clean() -> None:
    """A state that was made again after the return is clean, so a live replica counts."""
    job = suspected(6)
    arrive(job)
    job.ready(job.ranks)
    job.step(9)
    job.exits(1, signal=SIGKILL, finished=9)
    job.spawned()
    job.arrive([1])
    job.arrive([0], finished=9, state_generation=2)
    assert sources(job) == {0: StateSource.SELF, 1: StateSource.PEER}
    assert job.last(journal.Formed).step == 9


def test_a_rank_that_did_not_come_to_take_its_state() -> None:
    """A rank that did not take its new state still has the old state, which does not count."""
    job = suspected(6)
    arrive(job)
    job.fail_step(0)
    job.arrive([0], finished=9, state_generation=1)
    job.arrive([1], finished=9, torn=True)
    assert job.last(journal.Formed).step == 6


def test_another_coordinator_knows_what_is_suspect() -> None:
    """A new coordinator reads from the journal which states may be wrong."""
    job = suspected(6, 8, checkpoints=(8,))
    take_over(job, snapshots=at(6, 8), checkpoints=((8, 1),))
    arrive(job)
    job.store_up()
    assert job.last(journal.Formed).step == 6


def test_a_coordinator_that_did_not_hear_it() -> None:
    """If the old coordinator did not record the report, the rank repeats it at the new one."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6, 8)))
    take_over(job, snapshots=at(6, 8))
    job.arrive([0], finished=9, state_generation=1)
    job.arrive([1], finished=9, state_generation=1, valid_steps=CLEAN)
    job.store_up()
    assert job.last(journal.Formed).step == 6
    assert len(job.recorded(journal.Suspected)) == 1


@pytest.mark.parametrize(("valid_steps", "kept"), [(CLEAN, True), (None, False)])
def test_what_an_agent_tells_the_next_coordinator(valid_steps: int | None, kept: bool) -> None:
    """An agent repeats a failed step at a new coordinator only if states may be wrong."""
    failed = p.StepFailed(
        rank=1,
        generation=1,
        kind=FaultKind.DEVICE_MEMORY,
        error="ECC",
        finished=9,
        valid_steps=valid_steps,
    )
    assert failed.lasting == kept


def test_snapshots_that_come_behind_the_hello() -> None:
    """A snapshot names the generation that made it, even if other generations formed since."""
    job = suspected(6, 8)
    arrive(job)
    take_over(job, snapshots=at(6, 8))  # the order of generation 2 never reached the agent
    job.say(0, p.Snapshots(kept=at(6, 8)))
    job.arrive([0], finished=9, state_generation=1, generation=1)
    job.arrive([1], finished=9, torn=True, generation=1)
    job.store_up()
    assert job.last(journal.Formed).step == 6
    job.stop()
    job.killed()
    (order,) = job.sent_by_node(p.WriteFinalCheckpoint).values()
    assert (order.step, order.generation, order.suspicions) == (6, 1, ((1, CLEAN),))


@pytest.mark.parametrize("ends", ["restart", "stuck"])
def test_a_rank_that_is_being_ended(ends: str) -> None:
    """A report from a rank that is about to be killed still excludes the states."""
    job = trained(9, policy=Policy(max_restarts=1))
    job.say(0, p.Snapshots(kept=at(6, 8)))
    if ends == "restart":
        job.raises(0, "RuntimeError: the loss is no number")
    else:
        job.fail_step(0)
        job.arrive([0], finished=9, state_generation=1)
        job.fire("leave")
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    job.killed()
    if ends == "restart":
        job.store_up()
    job.spawned()
    job.arrive(job.ranks if ends == "restart" else [1])
    assert job.last(journal.Formed).step == 6


def test_a_job_that_is_being_stopped() -> None:
    """A job that is being stopped writes a clean final checkpoint."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6, 8)))
    job.stop()
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    job.killed()
    assert job.sent_by_node(p.WriteFinalCheckpoint)[0].step == 6


def test_the_end_of_training() -> None:
    """If the final state may be wrong, the job does not dismiss the ranks."""
    job = trained(9)
    job.say(0, p.Snapshots(kept=at(6)))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    job.arrive(job.ranks, finished=9, done=True)
    assert not job.sent_by_node(p.EndSession)
    assert job.last(journal.Formed).step == 6


def test_a_node_on_trial() -> None:
    """A report from a new node is recorded, although the node leaves for its fault."""
    job = elastic.grown()
    job.ready(job.ranks)
    job.step_of([0, 1, 2, 4, 5], 10)
    job.fail_step(2, kind=FaultKind.DEVICE_MEMORY, valid_steps=9)
    assert [(event.rank, event.valid_steps) for event in job.recorded(journal.Suspected)] == [
        (2, 9)
    ]


def test_a_node_that_the_world_goes_on_without() -> None:
    """Snapshots of an agent that was left out count only if they are clean."""
    job = Driver(nodes=2, processes=1, least=1)
    job.train(5)
    job.lose(1)  # the connection broke; the agent and its snapshots remain
    job.arrive([0], finished=9, state_generation=1)
    job.ready([0])
    job.step_of([0], 10)
    job.say(0, p.Snapshots(kept={0: ((6, 1), (10, 2))}))
    job.pids[1] = 901
    alive = (p.LiveRank(rank=1, pid=901, training=True),)
    job.hello(1, generation=1, ranks=alive, snapshots={1: ((6, 1), (8, 1))})
    job.fail_step(0, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    job.arrive([0], finished=10, state_generation=2)
    assert job.last(journal.Formed).step == 6
    job.say(0, p.Snapshots(kept=at(6)))
    job.ready([0])
    job.step_of([0], 7)
    job.stop()
    job.killed()
    assert {order.step for order in job.sent_by_node(p.WriteFinalCheckpoint).values()} == {6}


def test_a_rank_outside_that_comes_to_say_it() -> None:
    """If a rank outside the world reports wrong states, the world returns to a clean state."""
    job = Driver(nodes=2, processes=1, least=1)
    job.train(9)
    job.say(0, p.Snapshots(kept=at(6)))
    job.lose(1)
    job.arrive([0], finished=9, state_generation=1)
    job.ready([0])
    job.step_of([0], 10)
    job.pids[1] = 901
    alive = (p.LiveRank(rank=1, pid=901, training=True),)
    job.hello(1, generation=1, ranks=alive)
    fields = {"generation": 1, "state_generation": 1, "valid_steps": CLEAN}
    job.arrive([1], finished=9, **fields)
    assert set(job.sent_by_node(p.GenerationEnded)) == {0}
    job.arrive([0], finished=10, state_generation=2)
    assert job.last(journal.Formed).step == 6


def test_final_checkpoint_are_clean() -> None:
    """The final checkpoint excludes snapshots and checkpoints that may be wrong."""
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
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY, valid_steps=CLEAN)
    job.raises(0)
    job.killed()
    (order,) = job.sent_by_node(p.WriteFinalCheckpoint).values()
    assert (order.step, order.generation, order.suspicions) == (6, 1, ((1, CLEAN),))
