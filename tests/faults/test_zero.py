"""ZeroRedundancyOptimizer behind DDP: every rank has a piece of the state that nobody else has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record

from rekindle.recovery import journal

# The script's scheduler changes the rate every 7 steps.
PLACES = ("between", "forward", "backward", "updated", "snapshot")


@pytest.mark.parametrize("place", PLACES)
def test_killed_rank(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """All go back to the snapshots of one step, the learning rate too, in their processes."""
    rank = PLACES.index(place) % RANKS
    baseline = baseline_of("zero")
    step = 9 if place == "snapshot" else 13
    run = job(Fault(rank, place, step), variant="zero", snapshot_every=5)
    assert_recovered(run, baseline, replaced={rank})
    [event] = run.events_of(journal.Formed)[1:]
    assert event.sources == {"snapshot": RANKS}
    # A peer may have been told before it had all of the last step's gradients.
    assert steps_lost(run)[0] in ((4, 5) if place == "snapshot" else (2, 3, 4))


@pytest.mark.parametrize("every", [6, 7])
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
    held = Fault(2, "backward", 9, do="pause"), Fault(2, "backward", 9, do="hiccup")
    run = job(*held, variant="zero")
    for rank in set(range(RANKS)) - {2}:
        run.wait_step(rank, 9)  # one that had less of it than the others could not go on with them
    run.release(0)
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
