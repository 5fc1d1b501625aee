"""A store that is slower than the interval, or full, does not delay the training."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_recovered
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.files import locked
from rekindle.checkpoints.retention import Retention
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

RANKS = 2
DUE = {4, 8, 12, 16, 20, 24}
PAUSES = (5, 9, 13, 17, 19, 21)


def pause(step: int) -> Fault:
    return Fault(0, "forward", step, do="pause")


def catch_up(run: Job, step: int) -> None:
    """Wait until all ranks pause in this step, and the agent has sealed all snapshots."""
    run.wait_pause(step, RANKS * PAUSES.index(step))


def release(run: Job, step: int) -> None:
    run.release_all(RANKS * PAUSES.index(step))


def written(run: Job) -> list[int]:
    return [event.step for event in run.events_of(journal.Checkpointed)]


def left_out(run: Job) -> list[int]:
    return [event.step for event in run.events_of(journal.CheckpointLeftOut)]


def failed(run: Job) -> list[int]:
    return [event.fault.finished for event in run.events_of(journal.CheckpointFailed)]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, baseline_of: Baselines) -> Job:
    """Run a job whose store is busy until step 13, and then full until step 21.

    A rank whose buffers are all in use takes the snapshot of a checkpoint after a later step. So
    the job pauses after each due checkpoint until the agent has sealed all snapshots.
    """
    keep = Retention(last=1, best=1, metric="no_such_value")
    run = Job(
        tmp_path_factory.mktemp("job"),
        *(fault for step in PAUSES for fault in pause_all(step, RANKS)),
        processes=RANKS,
        snapshot_every=2,
        checkpoint_every=4,
        keep=keep,
    )
    store = Path(run.spec.checkpoint_store)
    store.mkdir(parents=True)
    with run:
        with locked(store):
            for step in (5, 9):
                catch_up(run, step)
                release(run, step)
            catch_up(run, 13)
            assert written(run) == []
            run.wait_event(journal.CheckpointLeftOut)
        run.wait_event(journal.Checkpointed, step=12)
        agent = run.agent_pid(0)
        before = resource.prlimit(agent, resource.RLIMIT_FSIZE)
        resource.prlimit(agent, resource.RLIMIT_FSIZE, (8192, before[1]))
        for step in (13, 17):
            catch_up(run, step)
            release(run, step)
        catch_up(run, 19)
        run.wait(lambda: 16 in [*failed(run), *left_out(run)], "the end of the first that fails")
        release(run, 19)
        catch_up(run, 21)
        run.wait(lambda: 20 in failed(run), "the failure of the newest checkpoint")
        found = DirectoryStore(store).newest()
        assert found.checkpoint is not None
        assert (found.checkpoint.manifest.step, found.passed_over) == (12, ())
        resource.prlimit(agent, resource.RLIMIT_FSIZE, before)
        release(run, 21)
        assert_recovered(run, baseline_of("ddp", RANKS), replaced=())
    return run


def test_each_checkpoint_is_written_or_reported(troubled: Job) -> None:
    """Each due checkpoint is written, left out or failed; the last one is written."""
    outcomes = [*written(troubled), *left_out(troubled), *failed(troubled)]
    assert sorted(outcomes) == sorted(DUE)
    assert written(troubled)[-1] == 24


def test_what_a_busy_store_leaves_out(troubled: Job) -> None:
    """The journal names the checkpoint that was left out because the store was busy."""
    first = troubled.events_of(journal.CheckpointLeftOut)[0]
    assert first.step < 12
    assert "the store was busy with" in first.reason


def test_what_a_full_disk_refuses(troubled: Job) -> None:
    """The journal has an incident for each failed checkpoint, without those left out."""
    assert 20 in failed(troubled)
    assert {*failed(troubled)} <= {16, 20}
    faults = [event.fault for event in troubled.events_of(journal.CheckpointFailed)]
    assert all(fault.kind is FaultKind.STORAGE for fault in faults)
    assert all("raise the limit on file sizes" in fault.message for fault in faults)
    assert len(troubled.incidents()) == len(faults)


def test_old_checkpoints_are_removed(troubled: Job) -> None:
    """The writer of a checkpoint removes those that no rule keeps.

    The journal reports once a rule that cannot be applied.
    """
    assert [path.name[:15] for path in troubled.checkpoints()] == ["step-0000000024"]
    pruned = troubled.events_of(journal.CheckpointsPruned)
    assert sum(len(event.removed) for event in pruned) == len(written(troubled)) - 1
    assert ["did not log no_such_value" in event.error for event in pruned].count(True) == 1


def test_the_store_is_busy_with_shards(job: Callable[..., Job], baseline_of: Baselines) -> None:
    """No rank waits for a busy store, and the same steps are left out for all shards."""
    begin = Fault(0, "forward", 1, do="pause")
    run = job(begin, pause(21), variant="sharded", nodes=2, snapshot_every=2, checkpoint_every=4)
    run.wait_fault(0)
    hanging = Path(run.spec.checkpoint_store, "step-0000000004-g000001", "manifest.json")
    hanging.parent.mkdir(parents=True)
    os.mkfifo(hanging)  # a look for the checkpoint waits for the writer of this pipe
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


def test_an_interval_that_is_chosen(job: Callable[..., Job], baseline_of: Baselines) -> None:
    """The first checkpoint measures the cost, and the chosen interval makes the others few."""
    run = job(pause(3), pause(8), processes=RANKS, snapshot_every=0, checkpoint_every="auto")
    for number, step in enumerate((3, 8)):
        run.wait_fault(number)
        run.wait(lambda step=step: run.status().finished == step, f"word of step {step}")
        run.release(number)
    assert_recovered(run, baseline_of("ddp", RANKS), replaced=())
    assert (written(run)[0], written(run)[-1]) == (10, 24)
    chosen = run.events_of(journal.CheckpointInterval)[0]
    assert chosen.steps > 10
    assert "to write; Rekindle expects a fault every" in chosen.reason
