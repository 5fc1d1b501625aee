"""Recovery without an intact replica: from a snapshot, a checkpoint, or the start."""

from __future__ import annotations

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import (
    EVERY,
    fails,
    fails_with,
    killed_at_once,
    patient,
    reported_late,
    wrong_steps,
)

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

ALL = range(RANKS)


def cannot_be_brought_back(step: int) -> Row:
    """Return the row: a rank whose replacements end one after the other ends the attempt."""
    fault = Fault(1, "forward", step, life=0)
    again = Fault(1, "start", life=0, after=1)
    name = "rank that cannot be brought back"
    decided = *[Strategy.RECOVER_IN_PLACE] * 3, Strategy.RECOVER, Strategy.FAIL
    faults = fault, *[again] * 6
    return Row(name, step, faults, strategies=decided, replaced=None, check=limited)


def limited(ended: Ended, incident: journal.Incident) -> None:
    """Check that the policy limits the starts of the rank; one more is on another node."""
    begin, end = ended.window(next(row for row in ended.rows if row.check is limited))
    births = [at for at in ended.job.record.births(1) if begin <= at < end]
    assert len(births) <= 1 + ended.job.spec.policy.max_in_row


def transient_with_nothing_kept(step: int) -> Row:
    """Return the row: without any saved state a restart starts the training from step 0."""
    return Row(
        "transient error with nothing kept",
        step,
        (Fault(1, "update", step, do="raise", life=0),),
        strategies=(Strategy.RESTART,),
        lost=(step - 1, step, step + 1),
        replaced=EVERY,
    )


def leave(finished: int, after: int = 0) -> Row:
    """Return the row: all ranks leave their loop after this number of steps."""
    faults = [Fault(r, "evaluate", finished - 1, do="leave", life=0) for r in ALL]
    return Row(f"left after step {finished}", finished - 1, tuple(faults), strategies=())


def written(ended: Ended, number: int) -> list[int]:
    """Return the steps of the checkpoints that an attempt has written."""
    return [event.step for event in ended.only(number).of(journal.Checkpointed)]


DDP = Plan(
    "ddp",
    (
        Attempt(
            (
                killed_at_once(
                    "all ranks killed with nothing kept", 12, ALL, lost=12, sources={"fresh": 4}
                ),
                transient_with_nothing_kept(16),
                reported_late(22, valid_steps=0, kept=False),
                cannot_be_brought_back(28),
            ),
            {"snapshot_every": 0, "policy": patient(max_restarts=1)},
            outcome="failed",
            reason="rank 1 was ended by signal 9",
        ),
        Attempt(
            (
                killed_at_once("all ranks killed with a checkpoint", 32, ALL, lost=2),
                reported_late(39, valid_steps=35),
                leave(44),
            ),
            {"checkpoint_every": 5, "policy": patient()},
        ),
        Attempt(
            (
                killed_at_once(
                    "all ranks killed with snapshots",
                    52,
                    ALL,
                    lost=2,
                    sources={"snapshot": 1, "peer": 3},
                ),
                reported_late(59, valid_steps=55),
                leave(64),
            ),
            {"snapshot_every": 5, "checkpoint_every": 0},
        ),
        fails(
            reported_late(73, valid_steps=68),
            fails_with([1], "evaluate", 78, newer=False),
            snapshot_every=8,
            checkpoint_every=4,
        ),
        Attempt((leave(90),), {"checkpoint_every": 5, "snapshot_every": 5}),
        Attempt(()),
    ),
    steps=LONG,
)
FSDP = Plan(
    "fsdp",
    (
        Attempt((reported_late(9, valid_steps=5), leave(14)), {"checkpoint_every": 5}),
        Attempt(()),
    ),
    variant="fsdp",
)


@pytest.mark.parametrize(("plan", "row"), each_row(DDP, FSDP))
def test_return(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """The ranks continue from the newest clean state."""
    ended_of(plan).check(row)


@pytest.mark.parametrize("plan", [DDP, FSDP], ids=str)
def test_end(plan: Plan, ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The training equals an undisturbed job, except for the steps that the job repeated."""
    ended = ended_of(plan)
    ended.check_end(baseline_of(plan.variant, plan.ranks, plan.steps), wrong=wrong_steps(ended))


LEFT = [
    (DDP, 1, [*range(5, 45, 5), 44]),
    (DDP, 4, [80, 85, 90]),
    (FSDP, 0, [5, 10, 14]),
]


@pytest.mark.parametrize(
    ("plan", "number", "steps"), LEFT, ids=[f"{plan}-{steps[-1]}" for plan, _, steps in LEFT]
)
def test_checkpoint_of_an_early_end(
    plan: Plan, number: int, steps: list[int], ended_of: EndedOf
) -> None:
    """An early end has one checkpoint of its last step, and the next attempt continues from it.

    The steps take milliseconds: a busy store may leave out a checkpoint in between.
    """
    ended = ended_of(plan)
    assert ended.ends[number].finished == steps[-1]
    found = sorted(set(written(ended, number)))
    assert (found[0], found[-1]) == (steps[0], steps[-1])
    left_out = {event.step for event in ended.only(number).of(journal.CheckpointLeftOut)}
    assert {*found, *left_out} == {*steps}
    assert ended.only(number + 1).began()[0] == steps[-1]


def test_no_checkpoints_asked_for(ended_of: EndedOf) -> None:
    """If checkpoints are off, the end of the job writes none."""
    assert written(ended_of(DDP), 2) == []


def test_no_checkpoint_of_an_error(ended_of: EndedOf) -> None:
    """A script error causes no final checkpoint, and no checkpoint of an unfinished step.

    A rank without a free buffer takes a due checkpoint after a later step.
    """
    ended = ended_of(DDP)
    assert ended.only(3).of(journal.FinalCheckpoint) == []
    assert max(written(ended, 3)) <= ended.ends[3].finished
