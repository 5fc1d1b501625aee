"""The script itself fails: no endless recovery, and the first error is told as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job
from training_jobs.memory import wait_sealed
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

LAST = STEPS - 1
ERROR = "ValueError: injected into step"


@pytest.mark.parametrize(
    ("ranks", "step", "place"),
    soak_but(
        [
            ((2,), 0, "forward"),
            ((1,), 9, "forward"),
            ((0,), 9, "backward"),
            ((3,), 9, "update"),
            (range(RANKS), 0, "forward"),
            (range(RANKS), 9, "updated"),
            ((1,), 9, "between"),
            ((0,), LAST, "end"),
        ],
        ((1,), 9, "forward"),
        (range(RANKS), 0, "forward"),
        ((3,), 9, "update"),
        ((0,), LAST, "end"),
    ),
)
def test_error_ends_the_job_once(
    ranks: tuple[int, ...], step: int, place: str, job: Callable[..., Job]
) -> None:
    """An error of the script fails the job once, with the traceback of the first failing rank.

    Where there is a snapshot, its last words are written.
    """
    faults = [Fault(rank, place, step, do="raise") for rank in ranks]
    run = job(Fault(0, "forward", 7, do="pause"), *faults)
    if step:
        run.wait_fault(0)
        wait_sealed(run.agent_pid(0))
        run.release(0)
    ended = run.end()
    assert ended.outcome == "failed"
    assert ended.reason.startswith("rank ")
    assert f"{ERROR} {step}" in ended.reason
    (incident,) = run.incidents()
    assert incident.strategies == [Strategy.DUMP if step else Strategy.FAIL]
    raised = [fault for fault in incident.faults if fault.traceback]
    assert {fault.rank for fault in raised} <= set(ranks)
    assert incident.cause.at == min(fault.at for fault in raised)
    assert 'train.py"' in incident.cause.traceback
    assert "runpy" not in incident.cause.traceback
    assert all(len(run.record.lives(rank)) == 1 for rank in range(RANKS))
    assert len(run.events_of(journal.Ended)) == 1
    assert run.leftovers() == []


@pytest.mark.parametrize(
    ("place", "snapshots", "checkpoints", "lost"),
    soak_but(
        [("forward", 5, 0, 2), ("update", 5, 0, 2), ("forward", 0, 5, 2), ("update", 0, 0, 12)],
        ("update", 5, 0, 2),
        ("forward", 0, 5, 2),
    ),
)
def test_transient_error_is_restarted(
    place: str,
    snapshots: int,
    checkpoints: int,
    lost: int,
    job: Callable[..., Job],
    baseline: Record,
) -> None:
    """An error that does not come again costs a restart from the newest state that was kept."""
    run = job(
        Fault(1, place, 12, do="raise"),
        snapshot_every=snapshots,
        checkpoint_every=checkpoints,
        policy=Policy(max_restarts=1),
    )
    assert_recovered(run, baseline, replaced=range(RANKS))
    (incident,) = run.incidents()
    assert incident.strategies == [Strategy.RESTART]
    # Others may have been a step ahead of the first to fail, or still in the step before.
    assert abs(steps_lost(run)[0] - lost) <= 1


def test_lasting_error_ends_the_job(job: Callable[..., Job]) -> None:
    """One that comes twice at a step after the same beginning, whatever restarts are left.

    The first time the job has begun anew, then twice from its snapshot.
    """
    lasting = Fault(1, "forward", 9, life=0, do="raise", again=True)
    run = job(lasting, policy=Policy(max_restarts=5))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "after step 9, again when it was begun from the state of step 5" in ended.reason
    assert len(run.record.lives(1)) == 3
    assert run.leftovers() == []


@pytest.mark.parametrize("what", ["link", "wrapped"])
def test_error_of_the_script_that_reads_like_a_broken_link(
    job: Callable[..., Job], baseline: Record, what: str
) -> None:
    """An error that looks like a broken link is tried once more in place, and may be gone then."""
    run = job(Fault(1, "forward", 9, do=what))
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.strategy) == (Kind.LINK, Strategy.RETRY)


def test_lasting_error_that_reads_like_a_broken_link(job: Callable[..., Job]) -> None:
    """One that comes again and again ends the job, and its text is told."""
    run = job(Fault(1, "forward", 9, life=0, do="link", again=True))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "the sample names no ProcessGroup" in ended.reason
    assert run.leftovers() == []


def test_exit_status_of_a_rank_fails_the_job(job: Callable[..., Job]) -> None:
    """A rank that ends with a status of its own in the middle of training fails the job."""
    run = job(Fault(2, "forward", 9, do="exit"))
    ended = run.end()
    assert (ended.outcome, ended.reason.split(";")[0]) == (
        "failed",
        "rank 2 ended with exit status 3",
    )
    assert run.leftovers() == []


def test_error_of_one_rank_after_the_kill_of_another(
    job: Callable[..., Job], baseline: Record
) -> None:
    """An error in a step that a peer's death had already broken is not held against the script."""
    run = job(Fault(2, "forward", 9, do="over"), Fault(2, "forward", 9, do="raise"))
    run.wait_fault(0)
    run.kill(1)
    assert_recovered(run, baseline, replaced={1})
    assert steps_lost(run) == [0]
