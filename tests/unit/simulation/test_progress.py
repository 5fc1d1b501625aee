"""Steps, snapshots and checkpoints of simulated training, and the loss after a fault."""

from __future__ import annotations

import pytest

from rekindle.simulation.progress import Cadence, SimulatedProgress, Source

EVERY = Cadence(step=10.0, checkpoint=100.0, stall=5.0, snapshot=20.0, overhead=0.0)


def trained(seconds: float, cadence: Cadence = EVERY, speed: float = 1.0) -> SimulatedProgress:
    """Return the progress of a job after this time."""
    progress = SimulatedProgress(cadence)
    progress.train(seconds, speed)
    return progress


@pytest.mark.parametrize(
    ("seconds", "work", "checkpoints"),
    [
        (99.0, 99.0, 0),
        (102.0, 100.0, 0),  # the job still writes the checkpoint
        (106.0, 101.0, 1),
        (105.0 * 3 + 50.0, 350.0, 3),
    ],
)
def test_checkpoints_halt_training(seconds: float, work: float, checkpoints: int) -> None:
    """After each 100 s of work, a checkpoint takes 5 s, and counts after its end."""
    progress = trained(seconds)
    assert progress.work == pytest.approx(work)
    assert progress.checkpoints == checkpoints


def test_many_short_stretches_are_one_long_one() -> None:
    """Many short calls of train() are equal to one long call, also within a stall."""
    progress, stalled = SimulatedProgress(EVERY), 0.0
    for _ in range(1000):
        stalled += progress.train(0.7, 1.0)
    assert progress.work == pytest.approx(trained(700.0).work)
    assert stalled == pytest.approx(700.0 - progress.work)


@pytest.mark.parametrize(
    ("source", "left"), [(Source.LIVE, 150.0), (Source.MEMORY, 140.0), (Source.STORE, 100.0)]
)
def test_a_fall_back_loses_what_its_source_has_not(source: Source, left: float) -> None:
    """After 155 s of work, the job loses the current step, or the steps since its source.

    The source is the snapshot or the checkpoint.
    """
    progress = trained(160.0)
    assert progress.fall_back(source) == pytest.approx(155.0 - left)
    assert progress.work == pytest.approx(left)


def test_a_checkpoint_is_newer_than_an_older_snapshot() -> None:
    """From memory, the job resumes from the checkpoint if it is newer than any snapshot."""
    assert trained(110.0).snapshot_step() is None
    assert trained(130.0).snapshot_step() == 12
    without = Cadence(step=10.0, checkpoint=100.0, stall=5.0, snapshot=0.0, overhead=0.0)
    progress = trained(160.0, without)
    assert progress.snapshot_step() is None
    progress.fall_back(Source.MEMORY)
    assert progress.work == pytest.approx(100.0)


def test_a_broken_checkpoint_is_written_again() -> None:
    """A fault during a checkpoint discards the checkpoint, and loses no finished step."""
    progress = trained(103.0)
    assert progress.fall_back(Source.LIVE) == pytest.approx(0.0)
    assert progress.train(5.0, 1.0) == pytest.approx(5.0)
    assert (progress.checkpoints, progress.work) == (1, pytest.approx(100.0))


def test_a_roll_back_passes_checkpoints_over() -> None:
    """roll_back() resumes from the newest checkpoint before a step, or from the start."""
    progress = trained(105.0 * 3 + 50.0)
    assert progress.older(30) == 2
    assert progress.roll_back(30) == pytest.approx(150.0)
    assert progress.older(10) == 0
    progress.roll_back(10)
    assert progress.work == 0.0


def test_a_smaller_world_is_slower_and_its_checkpoints_rarer() -> None:
    """At half the speed, 205 s give 100 s of work and one checkpoint."""
    progress = trained(205.0, speed=0.5)
    assert (progress.checkpoints, progress.work) == (1, pytest.approx(100.0))
