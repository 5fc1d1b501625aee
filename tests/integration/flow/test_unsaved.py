"""A job that trains to the end while its store fails: the run says so, and a retry mends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from disks import NEEDS_MOUNTS, small_disk
from flow_jobs import TrainingRun
from prefect_side import Served

from rekindle.recovery.journal.journal import Checkpointed, CheckpointFailed, JobStarted

pytestmark = [pytest.mark.timeout(600), NEEDS_MOUNTS]


@pytest.mark.parametrize("required", [True, False])
def test_training_that_ends_without_its_last_checkpoint(
    served: Served, tmp_path: Path, required: bool
) -> None:
    """The state names the newest checkpoint, with its machine. Its type is as the job asks.

    After the store works again, a retry of the failed run writes the last checkpoint.
    """
    with small_disk(tmp_path / "disk", 8) as disk:
        path = str(disk.path / "checkpoints")
        checkpoint = {"path": path, "every": 2, "required": required}
        training = TrainingRun(served, tmp_path / "gate", 60, checkpoint=checkpoint)
        run = training.run
        run.until(lambda: run.count(Checkpointed), "a checkpoint is written")
        disk.fill()
        run.until(lambda: run.count(CheckpointFailed), "a checkpoint has failed")
        training.gate.touch()
        state = run.until_final()
        newest = training.newest(Checkpointed)
        message = state.message or ""
        assert "has finished training after step 60" in message
        assert f"step {newest.step}, at `" in message
        assert newest.path in message
        if not required:
            assert (state.type.value, state.name) == ("COMPLETED", "CompletedWithoutCheckpoint")
            return
        assert (state.type.value, state.name) == ("FAILED", "Failed")
        disk.free()
        run.retry()
        run.until(lambda: run.count(JobStarted) == 2, "the retry trains")
        assert run.until_final().name == "Completed"
        assert training.newest(Checkpointed).step == 60
