"""Faults in worlds of eight ranks, with the same results as in worlds of four."""

from __future__ import annotations

import pytest
from training_jobs.acts import lose
from training_jobs.baselines import Baselines
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import NODE, killed, killed_at_once, killed_while_forming, patient, paused

RANKS = 8
NODES = {"nodes": 4}


def half(step: int) -> Row:
    """Return the row: one rank of each pair of replicas is killed, on four nodes of two ranks."""
    return killed_at_once("half of the ranks", step, {0, 5, 2, 7}, of=RANKS)


def lost_node(step: int) -> Row:
    """Return the row: the ranks of a lost node get their state from ranks of other nodes."""
    return paused("a node", step, lose(2), ranks=RANKS, strategies=NODE, replaced={4, 5})


DDP = Plan(
    "ddp",
    (
        Attempt(
            (
                killed_while_forming("after Arrived"),
                killed(5, "backward", 5),
                killed(0, "update", 9),
                half(12),
                lost_node(16),
            ),
            {"policy": patient(max_restarts=1)},
        ),
    ),
    ranks=RANKS,
    settings=NODES,
)
HSDP = Plan(
    "hsdp",
    (Attempt((killed(6, "backward 1", 5), killed(1, "updated", 9), half(12), lost_node(16))),),
    variant="hsdp",
    ranks=RANKS,
    settings=NODES,
)
PLAIN = Plan("plain", (Attempt((killed(7, "collective", 9),)),), variant="plain", ranks=RANKS)
FSDP = Plan(
    "fsdp",
    (
        Attempt(
            (
                # Without a replica all ranks return to the snapshots of one step.
                Row(
                    "backward 0 of step 13",
                    13,
                    (Fault(3, "backward 0", 13),),
                    lost=(3, 4),
                    replaced={3},
                ),
            )
        ),
    ),
    variant="fsdp",
    ranks=RANKS,
)


@pytest.mark.parametrize(("plan", "row"), each_row(DDP, HSDP))
def test_lost_ranks(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """Only the lost ranks get new processes, and no step is lost."""
    ended_of(plan).check(row)


@pytest.mark.parametrize("plan", [DDP, HSDP], ids=str)
def test_end(plan: Plan, ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(plan).check_end(baseline_of(plan.variant, plan.ranks, plan.steps))


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "row"), each_row(PLAIN, FSDP))
def test_lost_rank_of_other_scripts(
    plan: Plan, row: Row, ended_of: EndedOf, baseline_of: Baselines
) -> None:
    """Only the lost rank is replaced, and the training equals the baseline bit by bit."""
    ended = ended_of(plan)
    ended.check(row)
    ended.check_end(baseline_of(plan.variant, plan.ranks, plan.steps))
