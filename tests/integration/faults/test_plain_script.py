"""Faults of a script that all-reduces its gradients itself, without DDP."""

from __future__ import annotations

import pytest
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import PASSING, killed, reported_late, retried, wrong_steps
from waiting import bound_s

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

STEPS = 78
LAST = STEPS - 1


def torn_when_others_are_ahead(step: int) -> Row:
    """Return the row: a rank is torn while the others wait in the next step, which follows."""

    def release(job: Job, number: int) -> None:
        for rank in set(range(RANKS)) - {2}:
            job.wait_step(step + 1, rank=rank)
        job.release(number)

    pause = Fault(2, "updated", step, do="pause", life=0)
    uce = Fault(2, "updated", step, do="uce", life=0, after=1)
    return Row(
        "step that a replica has finished is not done again",
        step,
        (pause, uce),
        release,
        strategies=(Strategy.RETRY,),
        resumed=step + 1,
        sources={"self": RANKS - 1, "peer": 1},
    )


def hangs(kind: str, rank: int, step: int) -> Row:
    """Return the row: a rank that hangs in a step is named and replaced."""

    def inject(job: Job, number: int) -> None:
        job.inject_held(number, kind, rank=rank, step=step + 2)

    hold = Fault(0, "forward", step, do="pause", life=0)
    return Row(kind, step, (hold,), inject, replaced={rank}, cause=(FaultKind.HANG, rank))


def ended_itself(ended: Ended, incident: journal.Incident) -> None:
    """Check that the exit status is the cause."""
    assert incident.cause.message.startswith(
        "rank 2 ended with exit status 3; the end of its stderr"
    )


PLAIN = Plan(
    "plain",
    (
        Attempt(
            (
                killed(0, "collective", 0),
                killed(1, "collective", 9),
                killed(3, "update", 13),
                *(retried(how, 3, "collective", 17 + 4 * n) for n, how in enumerate(PASSING)),
                torn_when_others_are_ahead(29),
                reported_late(39, valid_steps=35),
                Row(
                    "exit status of a rank",
                    46,
                    (Fault(2, "forward", 46, do="exit", life=0),),
                    strategies=(Strategy.DUMP,),
                    check=ended_itself,
                ),
            ),
            outcome="failed",
            reason="rank 2 ended with exit status 3",
        ),
        Attempt(
            (
                hangs("hang", 1, 50),
                hangs("hang-collective", 2, 56),
                hangs("livelock", 1, 62),
                retried("hiccup", 0, "collective", LAST),
                retried("uce", 1, "collective", LAST, after=1),
                retried("uce-temporary", 3, "collective", LAST, after=1),
                killed(2, "collective", LAST, after=1),
            ),
            settings={"policy": Policy(hang_timeout_s=bound_s(2.0), max_restarts=0)},
        ),
    ),
    variant="plain",
    steps=STEPS,
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAIN))
def test_fault(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """Each fault has the same result as with DDP."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended = ended_of(PLAIN)
    ended.check_end(baseline_of("plain", RANKS, STEPS), wrong=wrong_steps(ended))
