"""Errors of the script: no endless recovery, and the report has the first error unchanged."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import EVERY, fails, fails_with, patient

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

LAST = LONG - 1
ALL = range(RANKS)


def transient(place: str, step: int, lost: Collection[int]) -> Row:
    """Return the row: an error that does not recur causes a restart from the newest saved state.

    Other ranks can be a step ahead of the failed rank, or still in the step before.
    """
    return Row(
        f"transient error at {place} of step {step}",
        step,
        (Fault(1, place, step, do="raise", life=0),),
        strategies=(Strategy.RESTART,),
        lost=lost,
        replaced=EVERY,
    )


def lasting(step: int) -> Row:
    """Return the row: an error that recurs at a step after the same start ends the attempt.

    It does so although restarts are left. The attempt starts from another step the first time, and
    then twice from its snapshot.
    """
    first = Fault(1, "forward", step, do="raise", life=0)
    again = Fault(1, "forward", step, do="raise", life=0, after=1)
    return Row(
        "lasting error",
        step,
        (first, again, again),
        strategies=(Strategy.RESTART, Strategy.RESTART, Strategy.DUMP),
        lost=range(12),
        replaced=EVERY,
        check=is_lasting,
    )


def is_lasting(ended: Ended, incident: journal.Incident) -> None:
    """Check that two restarts have started rank 1, and that there is no third one."""
    begin, end = ended.window(next(row for row in ended.rows if row.check is is_lasting))
    births = ended.job.record.births(1)
    assert len([at for at in births if begin <= at < end]) == 2


def broken_link(what: str, step: int) -> Row:
    """Return the row: all ranks retry a step in which a library reports a broken link."""
    return Row(
        f"error of a broken link: {what}",
        step,
        (Fault(1, "forward", step, do=what, life=0),),
        strategies=(Strategy.RETRY,),
        cause=(FaultKind.LINK, 1),
    )


def lasting_link(step: int) -> Row:
    """Return the row: an error that recurs in each retry ends the attempt with its text."""
    fault = Fault(1, "forward", step, do="link", life=0)
    again = Fault(1, "forward", step, do="link", life=0, after=1)
    return Row(
        "lasting error of a broken link",
        step,
        (fault, again, again, again),
        strategies=(*[Strategy.RETRY] * 3, Strategy.FAIL),
    )


def broken_by_a_peer(step: int) -> Row:
    """Return the row: an error in a step that a peer's end has broken is not a script error."""

    def kill(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.kill(1)

    over = Fault(2, "forward", step, do="over", life=0)
    raises = Fault(2, "forward", step, do="raise", life=0, after=1)
    name = "error of one rank after the kill of another"
    return Row(name, step, (over, raises), kill, replaced={1}, cause=(FaultKind.PROCESS, 1))


DDP = Plan(
    "ddp",
    (
        fails(fails_with(ALL, "forward", 0)),
        fails(fails_with([2], "forward", 0, after=1)),
        Attempt(
            (
                broken_link("link", 3),
                broken_link("wrapped", 6),
                broken_by_a_peer(9),
                transient("forward", 17, (1, 2, 3)),
                transient("update", 22, (1, 2, 3)),
                lasting(29),
            ),
            {"policy": patient(max_restarts=5)},
            outcome="failed",
            reason="the same fault occurred after an earlier start from the state of step 25",
        ),
        Attempt(
            (
                transient("forward", 37, (1, 2, 3)),
                lasting_link(44),
            ),
            {"snapshot_every": 0, "checkpoint_every": 5, "policy": patient(max_restarts=1)},
            outcome="failed",
            reason="RuntimeError: [/gloo/transport/tcp/pair.cc:553] injected",
        ),
        fails(
            fails_with(ALL, "updated", 56),
            snapshot_every=5,
            checkpoint_every=0,
            policy=patient(),
        ),
        fails(fails_with([0], "end", LAST)),
        Attempt(()),
    ),
    steps=LONG,
)


@pytest.mark.parametrize(("plan", "row"), each_row(DDP))
def test_error(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """An error ends an attempt once, or has the result of its row."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all script errors equals that of an undisturbed job."""
    ended_of(DDP).check_end(baseline_of("ddp", RANKS, LONG))
