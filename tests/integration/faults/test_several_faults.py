"""Several faults: at the same time, during the first recovery, and in succession."""

from __future__ import annotations

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import killed_at_once, killed_while_forming, patient

SECONDS = [
    Fault(1, "start"),
    Fault(1, "after Arrived"),
    Fault(1, "receive"),
    Fault(1, "before StateReady"),
    Fault(1, "after StateReady"),
    Fault(1, "before StepDone"),
    Fault(0, "send"),
    Fault(2, "after Arrived"),
    Fault(3, "before StateReady"),
]


def killed_twice(rank: int, place: str, step: int) -> Row:
    """Return the row: a second kill during a recovery loses no step."""
    first = Fault(1, "forward", step, life=0)
    second = Fault(rank, place, life=0, after=1)
    name = f"then rank {rank} at {place}"
    return Row(name, step, (first, second), strategies=None, replaced={1, rank})


def replacement_and_survivors(step: int) -> Row:
    """Return the row: three kills during one recovery leave one replica, which is enough."""
    faults = (
        Fault(1, "forward", step, life=0),
        Fault(1, "before StateReady", life=0, after=1),
        Fault(2, "after Arrived", life=0, after=2),
        Fault(0, "before StateReady", life=0, after=3),
    )
    name = "then the replacement and two survivors"
    return Row(name, step, faults, strategies=None, replaced={0, 1, 2})


PLAN = Plan(
    "ddp",
    (
        Attempt(
            (
                killed_while_forming("before StateReady"),
                *(
                    killed_twice(second.rank, second.place, 5 + 5 * number)
                    for number, second in enumerate(SECONDS)
                ),
                replacement_and_survivors(55),
                killed_at_once("two ranks at once", 60, (1, 2)),
                killed_at_once("three ranks at once", 65, (0, 1, 2)),
                killed_at_once(
                    "all ranks at once",
                    72,
                    range(RANKS),
                    lost=2,
                    sources={"snapshot": 1, "peer": 3},
                ),
            ),
            {"policy": patient(max_restarts=1)},
        ),
    ),
    steps=LONG,
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAN))
def test_several_faults(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """With one live replica no step is lost; without one the ranks use the newest snapshot."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(PLAN).check_end(baseline_of("ddp", RANKS, LONG))
