"""What was kept is damaged, or cannot be written: it is never loaded, and never stops training."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import RANKS
from training_jobs.checks import (
    assert_recovered,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.memory import damage_snapshots, wait_sealed
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.recovery import journal
from rekindle.recovery.fault import Kind

PAUSE_ALL = pause_all(12)
STATE = "state-00000.safetensors"


def flip_a_byte(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def halve(path: Path) -> None:
    """Cut the second half off."""
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "state flipped": lambda checkpoint: flip_a_byte(checkpoint / STATE),
    "state truncated": lambda checkpoint: halve(checkpoint / STATE),
    "state missing": lambda checkpoint: (checkpoint / STATE).unlink(),
    "manifest flipped": lambda checkpoint: flip_a_byte(checkpoint / "manifest.json"),
    "manifest truncated": lambda checkpoint: halve(checkpoint / "manifest.json"),
    "manifest missing": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
}


def failed_at_18(job: Callable[..., Job]) -> Job:
    """Run a job that fails in step 18 with checkpoints of 5, 10 and 15 steps."""
    pauses = [Fault(0, "forward", step, do="pause") for step in (6, 11, 16)]
    run = job(*pauses, Fault(1, "forward", 18, do="raise"), checkpoint_every=5)
    for number, step in enumerate((5, 10, 15)):
        run.wait_event(journal.Checkpointed, step=step)
        run.release(number)
    assert run.end().outcome == "failed"
    assert len(run.checkpoints()) == 3
    run.plan()
    return run


@pytest.mark.parametrize("damage", soak_but(DAMAGES, "state flipped"))
def test_damaged_newest_checkpoint_on_resume(
    damage: str, job: Callable[..., Job], baseline: Record
) -> None:
    """A damaged newest checkpoint is passed over with its reason, and the one before is used."""
    run = failed_at_18(job)
    newest = run.checkpoints()[0]
    DAMAGES[damage](newest)
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    (skipped,) = run.events_of(journal.CheckpointSkipped)
    assert skipped.path == str(newest)
    assert skipped.reason
    assert run.events_of(journal.Formed)[-1].step == 10
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)


def test_all_checkpoints_damaged_on_resume(job: Callable[..., Job], baseline: Record) -> None:
    """With no valid checkpoint the job begins from the start, and the ledger says why."""
    run = failed_at_18(job)
    for checkpoint in run.checkpoints():
        flip_a_byte(checkpoint / STATE)
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert len(run.events_of(journal.CheckpointSkipped)) == 3
    assert run.events_of(journal.Formed)[-1].sources == {"fresh": 4}
    assert_same_training(run.record, baseline)


def test_resume_goes_on_from_the_newest_checkpoint(
    job: Callable[..., Job], baseline: Record
) -> None:
    """A failed job that is started again goes on from its newest checkpoint, to the bit."""
    run = failed_at_18(job)
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Formed)[-1].step == 15
    assert run.events_of(journal.CheckpointSkipped) == []
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)


@pytest.mark.parametrize(
    ("checkpoints", "source", "lost"),
    soak_but([(10, "checkpoint", 2), (0, "fresh", 12)], (10, "checkpoint", 2)),
)
def test_damaged_snapshot(
    checkpoints: int, source: str, lost: int, job: Callable[..., Job], baseline: Record
) -> None:
    """A snapshot damaged in memory is never loaded: a checkpoint is used, else the start."""
    run = job(*PAUSE_ALL, snapshot_every=6, checkpoint_every=checkpoints)
    run.wait_pause(12)
    if checkpoints:
        run.wait_event(journal.Checkpointed, step=10)
    assert damage_snapshots(run.agent_pid(0))
    run.kill(*range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert source in run.incidents()[0].sources
    assert max(steps_lost(run)) == lost


def test_damaged_newest_snapshot(job: Callable[..., Job], baseline: Record) -> None:
    """The snapshot before it is used: an agent keeps two."""
    run = job(*PAUSE_ALL, Fault(0, "forward", 9, do="pause"), snapshot_every=4)
    run.wait_fault(4)
    wait_sealed(run.agent_pid(0))  # else the next one is written over it
    run.release(4)
    run.wait_pause(12)
    assert damage_snapshots(run.agent_pid(0), step=12) == 1
    run.kill(*range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert max(steps_lost(run)) == 4
    assert run.events_of(journal.Formed)[-1].sources == {"snapshot": 1, "peer": 3}


def test_damaged_newest_checkpoint(job: Callable[..., Job], baseline: Record) -> None:
    """When four copies are damaged, the newest that is not is found."""
    run = job(*PAUSE_ALL, snapshot_every=0, checkpoint_every=5)
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    assert damage_snapshots(run.agent_pid(0)) == 2
    flip_a_byte(run.checkpoints()[0] / STATE)
    run.kill(*range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    formed = run.events_of(journal.Formed)[1:]
    assert [event.step for event in formed] == [10, 10, 5, 5]
    assert formed[-1].sources == {"checkpoint": RANKS}


def test_damaged_snapshot_of_one_node(job: Callable[..., Job], baseline: Record) -> None:
    """When one node's snapshot is damaged, the other node's is used."""
    run = job(*PAUSE_ALL, nodes=2, snapshot_every=5)
    run.wait_pause(12)
    assert damage_snapshots(run.agent_pid(0))
    run.kill(*range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert [event.step for event in run.events_of(journal.Formed)[1:]] == [10, 10]
    refused = run.events_of(journal.FaultSeen)[-1].fault
    assert (refused.kind, refused.node) == (Kind.RESTORE, 0)


def test_checkpoint_damaged_while_the_job_runs(job: Callable[..., Job], baseline: Record) -> None:
    """A checkpoint that is damaged after it was written is not loaded: the one before it is."""
    run = job(*PAUSE_ALL, nodes=2, snapshot_every=0, checkpoint_every=5)
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    flip_a_byte(run.checkpoints()[0] / STATE)
    run.kill_node(0, 1)
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert max(steps_lost(run)) == 7


def test_full_disk(job: Callable[..., Job], baseline: Record) -> None:
    """While no checkpoint can be written training goes on; the ledger has an incident for each."""
    pauses = (Fault(0, "forward", step, do="pause") for step in (8, 13))
    run = job(*pauses, checkpoint_every=5)
    run.wait_fault(0)
    run.wait_event(journal.Checkpointed, step=5)
    _, hard = resource.prlimit(run.agent_pid(0), resource.RLIMIT_FSIZE)
    resource.prlimit(run.agent_pid(0), resource.RLIMIT_FSIZE, (8192, hard))
    run.release(0)
    run.wait_event(journal.CheckpointFailed)
    run.release(1)
    assert_recovered(run, baseline, replaced=())
    failed = run.events_of(journal.CheckpointFailed)
    # One is overtaken, not waited for, while the agent is still busy with another.
    assert {10, 24} <= {event.fault.finished for event in failed} <= {10, 15, 20, 24}
    assert all(event.fault.kind is Kind.STORAGE for event in failed)
    assert all("raise the limit on file sizes" in event.fault.message for event in failed)
    found = DirectoryStore(Path(run.spec.checkpoint_store)).newest()
    assert found.checkpoint is not None
    assert (found.checkpoint.manifest.step, found.passed_over) == (5, ())
