"""The adapter of NPUs in a job on CPU, with records instead of MindSpore's device functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import MindSporeJob, assert_same, needs_mindspore
from mindspore_jobs.rows import Ended, Row, meet

from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
ROWS = [
    Row("memory error of rank 0", 5),
    Row("link error of rank 1", 9),
    Row("late memory error of rank 0, from after its update", 12),
    Row("late memory error of rank 1, from before its update", 15, back_to=8),
    Row("link error of rank 0 that is seen when its graph should have ended", 18),
]
ERRORS = (
    "0:5:graph:UCEError error occurs when execute, error_code=507053",
    "1:9:graph:HCCEError error occurs when execute",
    "0:12:graph:UCEError error occurs when execute, error_code=507054 at us=21",
    "1:15:graph:UCEError error occurs when execute, error_code=507054 at us=9",
    "0:18:device:HCCEError error occurs when execute",
)
CLEANED = ["stop", "clean", "resume", "reset"]
TOLERANT = {"MS_ENABLE_TFT": "{UCE:1, HCCE:1}"}
REPAIRED = ["stop", "find", "clean", "resume", "repair", "reset"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the job after all errors."""
    script = ("--npu", *(word for each in ERRORS for word in ("--error", each)))
    job = MindSporeJob(
        tmp_path_factory.mktemp("job"),
        *script,
        options=("--snapshot-every", "8"),
        environment=TOLERANT,
    )
    return meet(job, ROWS)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_error_costs_no_process(ended: Ended, row: Row) -> None:
    """An error that may have reached all ranks costs the steps since the newest snapshot."""
    ended.check(row)


def test_each_rank_stops_and_cleans_its_device(ended: Ended) -> None:
    """The order of MindSpore's functions is that of MindIO; a damaged device is repaired."""
    ended.check_end()
    calls = {rank: result["calls"] for rank, result in ended.job.results().items()}
    assert calls[0] == REPAIRED + CLEANED + REPAIRED + CLEANED + CLEANED
    assert calls[1] == CLEANED + CLEANED + CLEANED + REPAIRED + CLEANED


def test_the_training_is_that_of_an_undisturbed_run(ended: Ended, baseline: Baseline) -> None:
    """A rank does not get the loss of a step that raised an error, unless the step is repeated."""
    assert_same(ended.job, baseline(2), unwritten={0: 3, 1: 1})


def test_callbacks_keep_their_values_with_the_state(tmp_path: Path) -> None:
    """A rank that keeps its state begins the loop again, and stops where it would have stopped."""
    error = "0:15:before:HCCEError error occurs when execute"
    script = ("--npu", "--plateau", "--patience", "1", "--error", error)
    with MindSporeJob(tmp_path, *script, ranks=1, environment=TOLERANT) as job:
        assert job.end() == 0, job.story()
    (incident,) = job.incidents()
    assert (incident.strategy, incident.steps_lost) == (Strategy.RETRY, 0), job.story()
    assert job.results()[0]["seen"][-1][1] == 20


def test_an_error_behind_the_last_step_ends_the_training(tmp_path: Path) -> None:
    """All ranks have finished, so none meets another rank again."""
    script = ("--npu", "--error", "0:29:end:HCCEError error occurs when execute")
    with MindSporeJob(tmp_path, *script, environment=TOLERANT) as job:
        assert job.end() == 0, job.story()
    assert len(job.incidents()) == 1, job.story()
