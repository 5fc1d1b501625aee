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
from training_jobs.selection import soak_but

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


@pytest.mark.parametrize("variant", soak_but([*FAULTS], "state", "scaler-clip"))
def test_all_state_is_exact(variant: str, job: Callable[..., Job]) -> None:
    """After many faults all ranks have the state of an undisturbed run, bit by bit.

    The group of the optimizer and the lists that the script holds are still in use.
    """
    settings = {"variant": variant, **SETTINGS}
    whole = trained(job(**settings))
    run = job(*FAULTS[variant], **settings)
    record = trained(run)
    assert len(run.incidents()) == len(FAULTS[variant]), run.story()
    assert max(steps_lost(run)) <= 1
    assert_same(record, whole)


def test_a_resumed_job_is_exact(job: Callable[..., Job]) -> None:
    """What the script holds has an effect after a resume; the job equals an undisturbed one."""
    settings = {"variant": "state", **SETTINGS}
    whole = trained(job(**settings))
    run = job(Fault(1, "forward", 13, do="raise"), **settings)
    assert run.end().outcome == "failed"
    run.plan()
    run.start()
    record = trained(run)
    assert min(record.result(0)["losses"], key=int) == "13"
    assert_same(record, whole)


def assert_same(record: Record, whole: Record) -> None:
    """Check all losses, all state, and that the script's own objects are still in use."""
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
