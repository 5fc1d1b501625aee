"""A multi-bit error of HBM that is told late: what all ranks have made since is made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Strategy

# From step 7 on rank 2 computes what is wrong, and with it all ranks train; in step 9 it hears.
TOLD_LATE = Fault(2, "forward", 7, do="flip"), Fault(2, "forward", 9, do="ecc")
CLEAN = 7
WRONG = dict.fromkeys((7, 8, 9), 1)  # in the first generation


@pytest.mark.parametrize(
    ("variant", "snapshots", "checkpoints", "step"),
    soak_but(
        [
            ("ddp", 5, 0, 5),
            ("plain", 4, 0, 4),
            ("ddp", 0, 5, 5),
            ("ddp", 8, 4, 4),
            ("fsdp", 5, 0, 5),
        ],
        ("ddp", 8, 4, 4),
        ("fsdp", 5, 0, 5),
    ),
)
def test_all_ranks_go_back_to_what_is_clean(
    variant: str,
    snapshots: int,
    checkpoints: int,
    step: int,
    job: Callable[..., Job],
    baseline_of: Callable[[str], Record],
) -> None:
    """Live replicas, snapshots and checkpoints of wrong steps are passed over; no process ends."""
    baseline = baseline_of(variant)
    settings = {"snapshot_every": snapshots, "checkpoint_every": checkpoints}
    run = job(*pause_all(9), *TOLD_LATE, variant=variant, **settings)
    run.wait_pause(9)
    for written in range(checkpoints, 10, checkpoints) if checkpoints else ():
        run.wait_event(journal.Checkpointed, step=written)
    assert run.record.steps(0)[8]["loss"] != baseline.steps(0)[8]["loss"]
    for number in range(RANKS):
        run.release(number)
    assert_recovered(run, baseline, replaced=(), wrong=WRONG)
    assert run.events_of(journal.Formed)[1].step == step
    assert steps_lost(run) == [9 - step]
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.kind) == (Strategy.RETRY, Kind.DEVICE_MEMORY)
    (suspected,) = run.events_of(journal.Suspected)
    assert (suspected.clean, suspected.rank) == (CLEAN, 2)


def test_nothing_clean_is_kept(job: Callable[..., Job], baseline: Record) -> None:
    """All ranks begin anew rather than go on with what is wrong."""
    run = job(*TOLD_LATE, snapshot_every=0)
    assert_recovered(run, baseline, replaced=range(RANKS), wrong=WRONG)
    assert run.events_of(journal.Formed)[1].step == 0


def test_an_error_of_this_step(job: Callable[..., Job], baseline: Record) -> None:
    """It came after the last update had begun, so that no other rank is suspect."""
    run = job(Fault(2, "between", 9, do="flip"), Fault(2, "forward", 9, do="ecc"))
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    assert "peer" in run.incidents()[0].sources
