"""ZeroRedundancyOptimizer behind DDP: every rank has a piece of the state that nobody else has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault, held
from training_jobs.job import Job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal

# The script's scheduler changes the rate every 7 steps.
BEFORE = ("between", "forward", "backward")  # no other rank can finish the step
PLACES = (*BEFORE, "updated", "snapshot")


@pytest.mark.parametrize("place", soak_but(PLACES, "updated"))
def test_killed_rank(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """All go back to the snapshots of one step, the learning rate too, in their processes."""
    rank = PLACES.index(place) % RANKS
    baseline = baseline_of("zero")
    step = 9 if place == "snapshot" else 13
    run = job(*held(Fault(rank, place, step)), variant="zero", snapshot_every=5)
    run.release_abreast(0, step if place in BEFORE else step + 1)
    assert_recovered(run, baseline, replaced={rank})
    [event] = run.events_of(journal.Formed)[1:]
    assert event.sources == {"snapshot": RANKS}
    assert steps_lost(run)[0] in ((5,) if place == "snapshot" else (3, 4))


@pytest.mark.parametrize("every", soak_but([6, 7], 6))
def test_rate_changes_at_the_snapshot(
    every: int, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """What the scheduler has set in the step of the snapshot is in it."""
    baseline = baseline_of("zero")
    run = job(Fault(1, "forward", 9), variant="zero", snapshot_every=every)
    assert_recovered(run, baseline, replaced={1})
    assert baseline.result(0)["rate"] == [pytest.approx(1e-2 / 8)]


def test_step_is_done_again(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """A fault that broke no process costs no step."""
    baseline = baseline_of("zero")
    run = job(*held(Fault(2, "backward", 9, do="hiccup")), variant="zero")
    run.release_abreast(0, 9)  # a rank that lacked a step could not go on with the others
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
