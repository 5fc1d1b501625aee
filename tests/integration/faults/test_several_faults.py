"""More than one fault: at once, during the recovery from the first, and one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import (
    assert_recovered,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal

PAUSE_ALL = pause_all(12)
SECONDS = [
    Fault(1, "start", life=2),
    Fault(1, "after Arrived", life=2),
    Fault(1, "receive", life=2),
    Fault(1, "before StateReady", life=2),
    Fault(1, "after StateReady", life=2),
    Fault(1, "before StepDone", 9, life=2),
    Fault(0, "send", 9),
    Fault(2, "after Arrived", 9),
    Fault(3, "before StateReady", 9),
]


def pause_and_kill(run: Job, *ranks: int) -> None:
    """Kill some ranks at one moment, while all are in the same step."""
    run.wait_pause(12)
    run.kill(*ranks)
    run.release_all()


@pytest.mark.parametrize("ranks", soak_but([((1, 2),), ((0, 1, 2),)], ((0, 1, 2),)))
def test_ranks_killed_at_once(
    ranks: tuple[int, ...], job: Callable[..., Job], baseline: Record
) -> None:
    """Some ranks killed at one moment are one incident, and one live replica saves every step."""
    run = job(*PAUSE_ALL)
    pause_and_kill(run, *ranks)
    assert_recovered(run, baseline, replaced=ranks)
    assert steps_lost(run) == [0]


def test_all_ranks_killed_with_snapshots(job: Callable[..., Job], baseline: Record) -> None:
    """Killed all at once, the ranks go on from the newest snapshot in the agent's memory."""
    run = job(*PAUSE_ALL, snapshot_every=5)
    pause_and_kill(run, *range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [2]
    assert run.incidents()[0].sources == {"snapshot": 1, "peer": 3}


def test_all_ranks_killed_with_a_checkpoint(job: Callable[..., Job], baseline: Record) -> None:
    """Killed all at once without snapshots, the ranks go on from the newest state that was kept."""
    run = job(*PAUSE_ALL, snapshot_every=0, checkpoint_every=5)
    pause_and_kill(run, *range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [2]


def test_all_ranks_killed_with_nothing_kept(job: Callable[..., Job], baseline: Record) -> None:
    """Killed all at once with nothing kept, the ranks begin anew, and the ledger says so."""
    run = job(*PAUSE_ALL, snapshot_every=0)
    pause_and_kill(run, *range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [12]
    assert run.incidents()[0].sources == {"fresh": 4}


@pytest.mark.parametrize(
    "second",
    soak_but(
        SECONDS,
        Fault(1, "receive", life=2),
        Fault(0, "send", 9),
    ),
    ids=lambda fault: f"{fault.rank}.{fault.life} {fault.place}",
)
def test_second_kill_during_the_recovery(
    second: Fault, job: Callable[..., Job], baseline: Record
) -> None:
    """A second kill in the middle of a recovery is survived without the loss of a step."""
    run = job(Fault(1, "forward", 9), second)
    assert_recovered(run, baseline, replaced={1, second.rank})
    assert set(steps_lost(run)) == {0}


def test_replacement_and_survivor_killed(job: Callable[..., Job], baseline: Record) -> None:
    """The replacement and two survivors killed during one recovery leave one replica: enough."""
    run = job(
        Fault(1, "forward", 9),
        Fault(1, "before StateReady", life=2),
        Fault(2, "after Arrived", 9),
        Fault(0, "before StateReady", 9),
    )
    assert_recovered(run, baseline, replaced={0, 1, 2})
    assert set(steps_lost(run)) == {0}


def test_rank_that_cannot_be_brought_back(job: Callable[..., Job]) -> None:
    """A rank whose replacements die one after the other ends the job, with the reason."""
    run = job(Fault(1, "forward", 9), *(Fault(1, "start", life=life) for life in range(2, 8)))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "rank 1 was ended by signal 9" in ended.reason
    # Once more on another node.
    assert len(run.record.lives(1)) <= 2 + run.spec.policy.max_in_row
    assert run.leftovers() == []


def test_incidents_in_a_row(job: Callable[..., Job], baseline: Record) -> None:
    """Five incidents in one job, two of them of one rank, lose no step."""
    run = job(
        Fault(0, "forward", 3),
        Fault(3, "update", 6),
        Fault(1, "backward", 9),
        Fault(0, "updated", 12, life=2),
        Fault(2, "forward", 20),
    )
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [0] * 5
    assert [event.generation for event in run.events_of(journal.Formed)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kept", soak_but([5, 0], 5))
def test_all_survivors_torn(kept: int, job: Callable[..., Job], baseline_of) -> None:
    """When every survivor is inside its update, none of their states is used."""
    inside = [Fault(rank, "updated", 12, do="pause") for rank in range(RANKS)]
    run = job(*inside, variant="late", snapshot_every=kept)
    for number in range(RANKS):
        run.wait_fault(number)
    run.kill(1)
    for number in (0, 2, 3):
        run.release(number)
    ended = run.end()
    assert ended.outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline_of("late"))
    assert_samples_once(run.record)
    assert steps_lost(run) == [2 if kept else 12]
    assert run.leftovers() == []
