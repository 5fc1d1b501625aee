"""Callbacks of MindSpore's own that decide by what they have seen: as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from mindspore_jobs.job import STEPS, MindSporeJob, assert_same_results, needs_mindspore

from rekindle.recovery import journal
from rekindle.runtime.protocol import InjectionKind

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
# The learning rate falls behind the third epoch, if two others were seen before.
PLATEAU = "--plateau"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> MindSporeJob:
    """MindSpore alone."""
    with MindSporeJob(tmp_path_factory.mktemp("plain"), "--plain", PLATEAU) as job:
        assert job.end() == 0, job.story()
    return job


@pytest.mark.parametrize("die", ["0:23", "1:19"])
def test_what_they_have_seen_outlives_a_restart(
    tmp_path: Path, undisturbed: MindSporeJob, die: str
) -> None:
    """Also where a rank is killed in the last step of an epoch, or while its end is told."""
    script = (PLATEAU, "--die", die, "--after", "0.004")
    options = ("--max-restarts", "1", "--snapshot-every", "5")
    with MindSporeJob(tmp_path, *script, options=options) as job:
        assert job.end() == 0, job.story()
    assert len(job.events_of(journal.Decided)) == 1
    assert_same_results(job, undisturbed)


def test_it_goes_back_with_the_state(tmp_path: Path, undisturbed: MindSporeJob) -> None:
    """All go back behind the end of an epoch, in their processes: it is told once."""
    with MindSporeJob(tmp_path, PLATEAU, options=("--snapshot-every", "8")) as job:
        job.hold(2)
        pids = job.pids()
        for rank in (0, 1):
            job.inject(rank, InjectionKind.UCE, 23)
        job.release(2)
        assert job.end() == 0, job.story()
    assert [each.step for each in job.events_of(journal.Formed)] == [0, 16], job.story()
    assert [job.results()[rank]["pid"] for rank in (0, 1)] == pids
    assert_same_results(job, undisturbed)


def steps_of(job: MindSporeJob) -> list[int]:
    """How many steps the newest processes of the ranks have done."""
    return [len(job.results()[rank]["seen"]) for rank in (0, 1)]


def test_what_they_have_stopped_is_over(tmp_path: Path) -> None:
    """Another attempt has nothing left to do, and the same parameters."""
    script = (PLATEAU, "--patience", "1")
    with MindSporeJob(tmp_path, *script, options=("--checkpoint-every", "10")) as job:
        assert job.end() == 0, job.story()
        first = job.results()
        assert steps_of(job) == [20, 20]
        job.start()
        assert job.end() == 0, job.story()
    assert steps_of(job) == [0, 0], job.story()
    assert [job.results()[r]["digest"] for r in (0, 1)] == [first[r]["digest"] for r in (0, 1)]


def test_the_last_step_has_its_checkpoint(tmp_path: Path) -> None:
    """Also if all ranks that did it end before they have seen to that."""
    options = ("--checkpoint-every", "1000", "--max-restarts", "1")
    with MindSporeJob(tmp_path, options=options) as job:
        job.hold(STEPS, between=True)
        pids = job.pids()
        job.wait_step(STEPS)
        os.kill(pids[1], signal.SIGKILL)
        job.wait_event(journal.Decided)
        (tmp_path / f"rest-{STEPS}").unlink()
        assert job.end() == 0, job.story()
    assert {each.step for each in job.events_of(journal.Checkpointed)} == {STEPS}, job.story()
    assert job.events_of(journal.Formed)[-1].step == STEPS
