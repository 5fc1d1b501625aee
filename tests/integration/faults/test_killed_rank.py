"""One rank is killed: nothing of the training is lost, and the others never notice."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.policy import Policy, Strategy

LAST = STEPS - 1


PLACES = [
    ("ddp", 1, 9, "forward"),
    ("ddp", 0, 9, "backward"),
    ("ddp", 3, 12, "update"),
    ("ddp", 2, 9, "updated"),
    ("ddp", 0, 10, "between"),
    ("ddp", 0, 9, "snapshot"),
    ("ddp", 0, 9, "after SnapshotTaken"),
    ("ddp", 1, 0, "forward"),
    ("ddp", 0, 0, "backward"),
    ("ddp", 2, 0, "update"),
    ("ddp", 1, LAST, "forward"),
    ("ddp", 0, LAST, "last line"),
    ("plain", 1, 9, "collective"),
    ("plain", 0, 0, "collective"),
    ("plain", 3, 9, "update"),
    ("plain", 2, LAST, "collective"),
]


@pytest.mark.parametrize(
    ("variant", "rank", "step", "place"),
    soak_but(
        PLACES,
        ("ddp", 0, 9, "backward"),
        ("ddp", 1, 0, "forward"),
        ("ddp", 0, LAST, "last line"),
        ("plain", 3, 9, "update"),
    ),
)
def test_rank_killed_at_a_place(
    variant: str,
    rank: int,
    step: int,
    place: str,
    job: Callable[..., Job],
    baseline_of: Callable[[str], Record],
) -> None:
    """A rank killed anywhere in a step is replaced from a live replica: no step is lost."""
    run = job(Fault(rank, place, step), variant=variant)
    assert_recovered(run, baseline_of(variant), replaced={rank})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.RECOVER_IN_PLACE
    assert set(incident.sources) == {"self", "peer"}
    assert (incident.cause.rank, incident.faults[0].node) == (rank, 0)


@pytest.mark.parametrize("how", soak_but(["segv", "abrt"], "segv"))
def test_rank_that_crashes(how: str, job: Callable[..., Job], baseline: Record) -> None:
    """A rank that ends itself by SIGSEGV or SIGABRT is replaced like one that was killed."""
    run = job(Fault(2, "backward", 9, do=how))
    assert_recovered(run, baseline, replaced={2})
    assert steps_lost(run) == [0]
    assert f"SIG{how.upper()}" in run.incidents()[0].cause.message


def test_rank_killed_when_it_has_done_all_steps(job: Callable[..., Job], baseline: Record) -> None:
    """A rank killed after its last step, but before the dismissal, is replaced."""
    slow = Fault(0, "last line", LAST, do="pause")
    run = job(Fault(1, "after Arrived", LAST), slow)
    run.wait_event(journal.FaultSeen)
    run.release(1)
    assert_recovered(run, baseline, replaced={1})
    assert steps_lost(run) == [0]


def test_rank_killed_after_the_dismissal(job: Callable[..., Job], baseline: Record) -> None:
    """A rank killed after the Session needs a restart, which does over only what no one holds."""
    run = job(*pause_all(17), Fault(1, "end", LAST), policy=Policy(max_restarts=1))
    run.wait_pause(17)  # else a snapshot is left out where the agent is a whole interval behind
    for rank in range(RANKS):
        run.release(rank)
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert [incident.strategy for incident in run.incidents()] == [Strategy.RESTART]
    assert steps_lost(run)[0] <= 5


def test_rank_killed_after_the_dismissal_without_restarts(job: Callable[..., Job]) -> None:
    """Without restarts, a rank killed after the Session fails the job with its reason."""
    run = job(Fault(1, "end", LAST))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "rank 1 was ended by signal 9" in ended.reason
    assert run.leftovers() == []


def test_rank_killed_before_the_first_generation(job: Callable[..., Job], baseline: Record) -> None:
    """A rank killed before any generation costs a restart, not the job."""
    run = job(Fault(1, "start"), policy=Policy(max_restarts=1))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [0]


@pytest.mark.parametrize(
    "place",
    soak_but(["after Arrived", "before StateReady", "after StateReady"], "before StateReady"),
)
def test_rank_killed_while_the_first_generation_forms(
    place: str, job: Callable[..., Job], baseline: Record
) -> None:
    """A rank killed on its way into the first generation is replaced, or all are restarted."""
    run = job(Fault(1, place), policy=Policy(max_restarts=1))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert steps_lost(run) == [0]


@pytest.mark.parametrize("seed", soak_but(range(3), 0))
def test_rank_killed_at_any_moment(seed: int, job: Callable[..., Job], baseline: Record) -> None:
    """A rank killed from outside, wherever it just is, is replaced: no step is lost."""
    chance = random.Random(seed)
    rank, step = chance.randrange(RANKS), chance.randrange(1, LAST - 4)
    run = job()
    run.wait_step(rank, step)
    run.kill(rank)
    assert_recovered(run, baseline, replaced={rank})
    assert steps_lost(run) == [0]
