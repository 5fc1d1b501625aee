"""A store that is slower than the interval: checkpoints are left out, and nobody waits for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from training_jobs.checks import assert_recovered
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record

from rekindle.checkpoints.files import locked
from rekindle.checkpoints.retention import Retention
from rekindle.recovery import journal

PAUSE = Fault(0, "forward", 21, do="pause")


def written(run: Job) -> list[int]:
    return [event.step for event in run.events_of(journal.Checkpointed)]


def left_out(run: Job) -> list[int]:
    return [event.step for event in run.events_of(journal.CheckpointLeftOut)]


def test_the_store_is_busy(job: Callable[..., Job], baseline: Record) -> None:
    """Of what is due meanwhile nothing piles up; each one that is left out is told of."""
    run = job(PAUSE, snapshot_every=2, checkpoint_every=4)
    root = Path(run.spec.checkpoint_store)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        run.wait_fault(0)
        assert written(run) == []
        run.wait_event(journal.CheckpointLeftOut, count=2)
    run.wait_event(journal.Checkpointed)
    run.release(0)
    assert_recovered(run, baseline, replaced=())
    assert written(run)[-1] == 24
    assert len(written(run)) + len(left_out(run)) == 6
    assert not {*written(run)} & {*left_out(run)}
    assert run.events_of(journal.CheckpointFailed) == []
    assert "the store was busy with" in run.events_of(journal.CheckpointLeftOut)[0].reason


def test_the_store_is_busy_with_shards(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """No rank waits for it, and the same steps are left out of all shards."""
    begin = Fault(0, "forward", 1, do="pause")
    run = job(begin, PAUSE, variant="sharded", nodes=2, snapshot_every=2, checkpoint_every=4)
    run.wait_fault(0)
    hanging = Path(run.spec.checkpoint_store, "step-0000000004-g000001", "manifest.json")
    hanging.parent.mkdir(parents=True)
    os.mkfifo(hanging)  # whoever looks whether the checkpoint exists waits for its writer
    run.release(0)
    run.wait_fault(1)
    run.wait_event(journal.CheckpointLeftOut, step=16)
    assert (written(run), left_out(run)) == ([], [8, 12, 16])

    def go_on() -> bool:
        with contextlib.suppress(OSError):
            os.close(os.open(hanging, os.O_WRONLY | os.O_NONBLOCK))
        return 20 in written(run)

    run.wait(go_on, "the checkpoint that was due last")
    run.release(1)
    assert_recovered(run, baseline_of("sharded"), replaced=())
    assert (written(run), left_out(run)) == ([4, 20, 24], [8, 12, 16])


def test_an_interval_that_is_chosen(job: Callable[..., Job], baseline: Record) -> None:
    """After the first checkpoint it is known what one costs, and the rest of them are few."""
    pauses = [Fault(0, "forward", step, do="pause") for step in (3, 8)]
    run = job(*pauses, snapshot_every=0, checkpoint_every="auto")
    for number, step in enumerate((3, 8)):
        run.wait_fault(number)
        run.wait(lambda step=step: run.status().finished == step, f"word of step {step}")
        run.release(number)
    assert_recovered(run, baseline, replaced=())
    assert (written(run)[0], written(run)[-1]) == (10, 24)
    chosen = run.events_of(journal.CheckpointInterval)[0]
    assert chosen.steps > 10
    assert "to write; a fault is expected every" in chosen.reason


def test_old_checkpoints_go(job: Callable[..., Job], baseline: Record) -> None:
    """Whoever commits one removes those that no rule keeps; what is amiss is said once."""
    run = job()
    assert run.end().outcome == "succeeded"
    keep = Retention(last=1, best=1, metric="no_such_value")
    run.plan(*(Fault(0, "forward", step, do="pause") for step in (7, 13, 19)))
    run.start(checkpoint_every=6, keep=keep, arguments=(*run.spec.arguments[:-1], "48"))
    assert run.end().outcome == "succeeded", run.story()
    assert [path.name[:15] for path in run.checkpoints()] == ["step-0000000048"]
    pruned = run.events_of(journal.CheckpointsPruned)
    assert sum(len(event.removed) for event in pruned) == len(written(run)) - 1
    assert ["has not logged no_such_value" in event.error for event in pruned].count(True) == 1
