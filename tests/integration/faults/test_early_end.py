"""A script that leaves its loop before the last step: nothing that it trained is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal

EVERY = 5


@pytest.mark.parametrize(
    ("variant", "finished"),
    soak_but([("ddp", 9), ("ddp", 10), ("fsdp", 9)], ("ddp", 9), ("fsdp", 9)),
)
def test_checkpoint_of_the_last_step(
    variant: str, finished: int, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """There is one checkpoint of it, and the next attempt goes on from there, to the bit."""
    baseline = baseline_of(variant)
    leave = [Fault(rank, "evaluate", finished - 1, do="leave") for rank in range(RANKS)]
    run = job(*leave, variant=variant, checkpoint_every=EVERY)
    ended = run.end()
    assert (ended.outcome, ended.finished) == ("succeeded", finished), run.story()
    steps = [event.step for event in run.events_of(journal.Checkpointed)]
    assert steps == sorted({EVERY, finished})
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Formed)[-1].step == finished
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    assert run.leftovers() == []


def test_no_checkpoints_asked_for(job: Callable[..., Job]) -> None:
    """Where none is ever written, none is written at the end."""
    run = job(*(Fault(rank, "evaluate", 8, do="leave") for rank in range(RANKS)))
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Checkpointed) == []


def test_exception_of_the_script(job: Callable[..., Job]) -> None:
    """A script that fails has no checkpoint made of what it was doing."""
    run = job(Fault(1, "evaluate", 8, do="raise", life=0, again=True), checkpoint_every=EVERY)
    assert run.end().outcome == "failed", run.story()
    assert {event.step for event in run.events_of(journal.Checkpointed)} <= {EVERY}
