"""MindSpore jobs that are stopped and started again continue from the store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import STEPS, MindSporeJob, assert_same, needs_mindspore
from stores.servers import ENVIRONMENT, rclone

from rekindle.recovery.journal import journal

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]


def stop(job: MindSporeJob, step: int) -> None:
    """Stop a job while its ranks wait; check that they leave their newest state."""
    job.wait_step(step)
    job.client().stop(by="a test")
    assert job.end() != 0, job.story()
    assert job.events_of(journal.Checkpointed)[-1].step == step, job.story()
    job.release(step)


def steps_done(job: MindSporeJob) -> list[int]:
    """Return the number of steps that the newest process of each rank has done."""
    return [len(job.results()[rank]["seen"]) for rank in (0, 1)]


def test_a_directory_as_store(tmp_path: Path, baseline: Baseline) -> None:
    """The next attempt continues after the last step of the earlier one.

    The last step of the job has a checkpoint, although the ranks end before they write it.
    """
    options = ("--snapshot-every", "10", "--checkpoint-every", "1000", "--max-restarts", "1")
    options += ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    with MindSporeJob(tmp_path, options=options) as job:
        job.hold(14)
        stop(job, 14)
        job.hold(STEPS, between=True)
        job.start()
        job.wait_step(STEPS)
        os.kill(job.pids()[1], signal.SIGKILL)
        job.wait_event(journal.Decided)
        (tmp_path / f"rest-{STEPS}").unlink()
        assert job.end() == 0, job.story()
    formed = [(each.step, each.sources) for each in job.events_of(journal.Formed)]
    assert formed[1] == (14, {"checkpoint": 2})
    assert formed[-1][0] == STEPS
    assert {each.step for each in job.events_of(journal.Checkpointed)} == {14, STEPS}, job.story()
    assert_same(job, baseline(2))


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """Return a location in an object store on a local server."""
    with rclone(tmp_path / "s3") as server:
        yield server.location()


def test_an_object_store(tmp_path: Path, baseline: Baseline, bucket: str) -> None:
    """The next attempt continues after the last step, until a callback stops the training.

    A further attempt does no step and has the same parameters.
    """
    script = ("--plateau", "--patience", "1")
    options = ("--checkpoint-every", "10", "--checkpoint-dir", bucket)
    with MindSporeJob(tmp_path, *script, options=options, environment=ENVIRONMENT) as job:
        job.hold(14)
        stop(job, 14)
        job.start()
        assert job.end() == 0, job.story()
        second = job.results()
        assert steps_done(job) == [6, 6], job.story()
        formed = job.events_of(journal.Formed)[-1]
        assert (formed.step, formed.sources) == (14, {"checkpoint": 2})
        job.start()
        assert job.end() == 0, job.story()
    assert steps_done(job) == [0, 0], job.story()
    assert [job.results()[r]["digest"] for r in (0, 1)] == [second[r]["digest"] for r in (0, 1)]
    losses = {step - 1: loss for _, step, loss, _ in baseline(2, "--plateau").results()[0]["seen"]}
    assert job.losses(0) == {step: loss for step, loss in losses.items() if step < 20}
