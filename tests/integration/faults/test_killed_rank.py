"""A kill of one rank loses no step, and the other ranks keep their processes."""

from __future__ import annotations

import random

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import EVERY, killed, patient

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

LAST = LONG - 1
WITHOUT_RESTART = tuple(each for each in Policy().strategies if each is not Strategy.RESTART)


def crashed(how: str, step: int) -> Row:
    """Return the row: a rank that ends by its own signal is replaced like a killed rank."""

    def named(ended: Ended, incident: journal.Incident) -> None:
        assert f"SIG{how.upper()}" in incident.cause.message

    fault = Fault(2, "backward", step, do=how, life=0)
    return Row(f"SIG{how.upper()}", step, (fault,), replaced={2}, check=named)


def at_any_moment(seed: int, step: int) -> Row:
    """Return the row: a rank is killed at a random moment; a peer pauses in a later step."""
    chance = random.Random(seed)
    rank, moment = chance.randrange(RANKS), chance.randrange(step, step + 4)

    def kill(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.kill(rank)
        job.release(number + 1)

    trigger = Fault(rank, "between", moment, do="nothing", life=0)
    hold = Fault((rank + 1) % RANKS, "forward", step + 6, do="pause", life=0)
    return Row(f"any moment, seed {seed}", step, (trigger, hold), kill, replaced={rank})


def release_at_death(job: Job, number: int) -> None:
    """Release the rank that delays the dismissal after the fault of the other rank is known."""
    job.wait_fault(number)
    job.wait(lambda: 3 in [fault.rank for fault in job.incidents()[-1].faults], "the death")
    job.release(number + 1)


def starts_again(ended: Ended, incident: journal.Incident) -> None:
    """Only the rank starts again if another one has reached its Session; otherwise all ranks do."""
    assert incident.strategies in ([Strategy.RECOVER_IN_PLACE], [Strategy.RESTART])


DDP = Plan(
    "ddp",
    (
        Attempt(
            (
                killed(1, "forward", 0),
                killed(0, "backward", 0, after=1),
                killed(2, "update", 0, after=1),
                killed(1, "forward", 4),
                killed(0, "backward", 9),
                killed(3, "update", 12),
                killed(2, "updated", 19),
                killed(0, "between", 25),
                killed(0, "snapshot", 29),
                killed(0, "after SnapshotTaken", 34),
                crashed("segv", 39),
                crashed("abrt", 44),
                at_any_moment(0, 50),
                at_any_moment(1, 60),
                at_any_moment(2, 70),
                killed(1, "forward", LAST),
                killed(0, "last line", LAST, after=1),
                Row(
                    "after the dismissal, without restarts",
                    LAST,
                    (Fault(1, "end", LAST, life=0, after=1),),
                    strategies=(Strategy.DUMP,),
                ),
            ),
            settings={"policy": patient(strategies=WITHOUT_RESTART)},
            outcome="failed",
            reason="rank 1 was ended by signal 9",
        ),
        Attempt(
            (
                Row(
                    "before the first generation",
                    LAST,
                    (Fault(1, "start", life=0, after=1),),
                    strategies=None,
                    replaced=None,
                    check=starts_again,
                ),
                Row(
                    "after all steps",
                    LAST,
                    (
                        Fault(3, "after Arrived", LAST, life=0, after=1),
                        Fault(0, "last line", LAST, do="pause", life=0, after=2),
                    ),
                    release_at_death,
                    replaced={3},
                ),
                Row(
                    "after the dismissal",
                    LAST,
                    (Fault(1, "end", LAST, life=0, after=1),),
                    strategies=(Strategy.RESTART,),
                    lost=range(6),
                    replaced=EVERY,
                ),
            ),
            settings={"policy": patient(max_restarts=2)},
        ),
    ),
    steps=LONG,
)


@pytest.mark.parametrize(("plan", "row"), each_row(DDP))
def test_killed_rank(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """Each fault has the result of its row; nearly all lose no step."""
    ended_of(plan).check(row)


@pytest.mark.parametrize("plan", [DDP], ids=str)
def test_end(plan: Plan, ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(plan).check_end(baseline_of(plan.variant, plan.ranks, plan.steps))


def test_generations(ended_of: EndedOf) -> None:
    """Each recovery takes one generation, without a failed one in between.

    Ranks that all start again before their Session form no generation (`journal.OF_SCRIPT`).
    """
    events = ended_of(DDP).of(journal.Formed)
    formed = [event.generation for event in events if journal.OF_SCRIPT not in event.sources]
    assert formed == list(range(1, len(formed) + 1))
