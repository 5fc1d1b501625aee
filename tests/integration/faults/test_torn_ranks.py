"""If all survivors of a kill are inside their update, none of their states is used."""

from __future__ import annotations

import pytest
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import killed_while_forming, patient


def torn(lost: int) -> Row:
    """Return the row: a rank is killed after all updates, but before the collective."""

    def kill(job: Job, number: int) -> None:
        for rank in range(RANKS):
            job.wait_fault(number + rank)
        job.kill(1)
        for rank in (0, 2, 3):
            job.release(number + rank)

    pauses = tuple(Fault(rank, "updated", 12, do="pause", life=0) for rank in range(RANKS))
    return Row("all survivors torn", 12, pauses, kill, strategies=None, lost=lost, replaced=None)


def plan(name: str, place: str, kept: int, lost: int) -> Plan:
    """Return a job whose script has a collective after its update."""
    attempt = Attempt(
        (killed_while_forming(place), torn(lost)), {"policy": patient(max_restarts=1)}
    )
    return Plan(name, (attempt,), variant="late", settings={"snapshot_every": kept})


KEPT = plan("snapshots", "after StateReady", 5, 2)
NOTHING = plan("nothing kept", "after Arrived", 0, 12)


@pytest.mark.parametrize(("plan", "row"), each_row(KEPT))
def test_torn_ranks(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """All ranks return to the newest snapshot."""
    ended_of(plan).check(row)


@pytest.mark.parametrize("plan", [KEPT], ids=str)
def test_end(plan: Plan, ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training equals that of an undisturbed job."""
    ended_of(plan).check_end(baseline_of(plan.variant, plan.ranks, plan.steps))


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "row"), each_row(NOTHING))
def test_torn_ranks_with_nothing_kept(
    plan: Plan, row: Row, ended_of: EndedOf, baseline_of: Baselines
) -> None:
    """All ranks start from step 0."""
    ended = ended_of(plan)
    ended.check(row)
    ended.check_end(baseline_of(plan.variant, plan.ranks, plan.steps))
