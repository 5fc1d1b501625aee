"""The machine, when a rank tells late that what all have made since may be wrong."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.plan import Source
from rekindle.recovery.policy import Strategy
from rekindle.runtime import protocol as p

CLEAN = 7


def suspected(*snapshots: int, checkpoints: tuple[int, ...] = ()) -> Driver:
    """Two ranks have finished step 9 when one says that it may be wrong from step 8 on."""
    job = trained(9)
    job.say(0, p.Snapshots(steps={0: snapshots}))
    for step in checkpoints:
        job.say(0, p.CheckpointWritten(step=step, generation=1, path="there"))
    job.fail_step(1, kind=Kind.DEVICE_MEMORY, clean=CLEAN)
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
    assert sources(job) == {0: Source.SNAPSHOT, 1: Source.PEER}
    assert job.told(p.Form)[0].step == 6
    assert not job.doomed
    job.ready(job.ranks)
    job.step(7)
    (incident,) = journal.incidents(job.history)
    assert (incident.steps_lost, incident.cause.clean) == (3, CLEAN)


def test_a_checkpoint_that_is_suspect() -> None:
    """It is passed over for an older one, and in later incidents as well."""
    job = suspected(checkpoints=(4, 8))
    arrive(job)
    assert set(sources(job).values()) == {Source.CHECKPOINT}
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
    assert set(sources(job).values()) == {Source.FRESH}


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
    assert sources(job) == {0: Source.SELF, 1: Source.PEER}
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
    job.lose_coordinator()
    job.hello(
        0,
        generation=1,
        ranks=tuple(p.LiveRank(rank=r, pid=job.pids[r], training=True) for r in job.ranks),
        snapshots={0: (6, 8)},
        checkpoints=((8, 1),),
    )
    arrive(job)
    job.store_up()
    assert job.last(journal.Formed).step == 6


def test_last_words_are_clean() -> None:
    """Neither a suspect snapshot nor a suspect checkpoint counts."""
    job = trained(9)
    job.say(0, p.Snapshots(steps={0: (6, 8)}))
    job.say(0, p.CheckpointWritten(step=8, generation=1, path="there"))
    job.fail_step(1, kind=Kind.DEVICE_MEMORY, clean=CLEAN)
    job.raises(0)
    job.killed()
    (order,) = job.told(p.Dump).values()
    assert (order.step, order.limit) == (6, CLEAN)
