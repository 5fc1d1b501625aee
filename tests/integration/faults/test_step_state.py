"""A repeated step begins with the state from before it, also on ranks that keep their processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import habits
from training_jobs.checks import steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record

SCRIPT = Path(habits.__file__)
SETTINGS = {"script": SCRIPT, "processes": 2, "steps": 24, "snapshot_every": 1}


def killed(*faults: tuple[int, str, int]) -> list[Fault]:
    """Return faults that kill a rank at a place of a step."""
    return [Fault(rank, place, step, life=0) for rank, place, step in faults]


def passing(*faults: tuple[int, str, int]) -> list[Fault]:
    """Return faults after which all processes repeat a step."""
    return [Fault(rank, place, step, life=0, do="hiccup") for rank, place, step in faults]


def trained(run: Job) -> Record:
    """Return the record of a job that has succeeded."""
    ended = run.end()
    assert ended.outcome == "succeeded", f"{ended}{run.story()}"
    return run.record


FAULTS = {
    "state": [
        *passing((0, "evaluate", 3), (1, "forward", 5)),
        *killed((1, "evaluate", 6), (0, "forward", 8), (1, "backward", 11), (0, "last line", 14)),
        *passing((0, "backward", 17)),
    ],
    "scaler": [
        *passing((0, "backward", 1), (1, "unscaled", 5)),
        *killed((1, "unscaled", 7), (0, "update", 10), (1, "update", 13), (0, "last line", 18)),
    ],
    "scaler-clip": [
        *passing((0, "unscaled", 1), (1, "update", 3)),
        *killed((1, "unscaled", 7), (0, "unscaled", 10), (1, "last line", 13)),
    ],
    "scaler-fsdp": [
        *passing((0, "unscaled", 1), (1, "update", 3)),
        *killed((1, "unscaled", 7), (0, "backward", 10)),
    ],
}


@pytest.mark.parametrize("variant", FAULTS)
def test_all_state_is_exact(variant: str, job: Callable[..., Job]) -> None:
    """All state of all ranks, and what the script holds, equal those of an undisturbed run."""
    settings = {"variant": variant, **SETTINGS}
    whole = trained(job(**settings))
    run = job(*FAULTS[variant], **settings)
    record = trained(run)
    assert len(run.incidents()) == len(FAULTS[variant]), run.story()
    assert max(steps_lost(run)) <= 1
    for rank in range(2):
        ours, theirs = record.result(rank), whole.result(rank)
        assert record.losses(rank) == whole.losses(rank), f"losses of rank {rank}"
        del ours["losses"], theirs["losses"]
        assert ours == theirs, f"rank {rank}"
        assert ours.get("kept rates", True)
        assert ours.get("kept last", True)
        assert ours["kept group"]
        assert ours["kept groups"]


def test_gradients_of_two_blocks_are_refused(job: Callable[..., Job]) -> None:
    """The second block that adds to the gradients of the first ends the job with the remedy."""
    run = job(variant="accumulate", **SETTINGS)
    ended = run.end()
    assert ended.outcome == "failed"
    assert "Do all micro-batches of an update in one `with step:` block" in ended.reason
    assert run.record.steps(0).keys() == {0, 1}
