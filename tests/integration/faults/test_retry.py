"""A fault inside a step that breaks no process: every one of them stays, and no step is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault, held
from training_jobs.job import STEPS, Job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

LAST = STEPS - 1
KINDS = {
    "hiccup": Kind.TRANSIENT,
    "uce": Kind.DEVICE_MEMORY,
    "uce-temporary": Kind.DEVICE_MEMORY,
}
PLACES = [
    ("ddp", 1, 9, "forward"),
    ("ddp", 0, 0, "forward"),
    ("ddp", 2, 9, "backward"),
    ("plain", 3, 9, "collective"),
    ("plain", 0, LAST, "collective"),
]


def next_steps(job: Job) -> list[int]:
    """The steps finished from which each generation but the first went on."""
    return [event.step for event in job.events_of(journal.Formed)][1:]


@pytest.mark.parametrize(
    ("how", "variant", "rank", "step", "place"),
    soak_but(
        [(how, *where) for how in KINDS for where in PLACES],
        ("hiccup", "ddp", 1, 9, "forward"),
        ("uce", "plain", 3, 9, "collective"),
        ("uce-temporary", "ddp", 2, 9, "backward"),
    ),
)
def test_fault_before_the_update(
    how: str,
    variant: str,
    rank: int,
    step: int,
    place: str,
    job: Callable[..., Job],
    baseline_of: Callable[[str], Record],
) -> None:
    """No rank has finished the step: it is done again, by the same processes."""
    run = job(*held(Fault(rank, place, step, do=how)), variant=variant)
    run.release_abreast(0, step)
    assert_recovered(run, baseline_of(variant), replaced=())
    assert steps_lost(run) == [0]
    assert next_steps(run) == [step]
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.kind) == (Strategy.RETRY, KINDS[how])
    assert incident.cause.rank == rank
    damaged = int(how == "uce")
    taken = {"self": RANKS - damaged} | ({"peer": 1} if damaged else {})
    assert incident.sources == taken


@pytest.mark.parametrize(
    ("how", "place"),
    soak_but(
        [(how, place) for how in KINDS for place in ("update", "updated")],
        ("hiccup", "update"),
        ("uce", "updated"),
    ),
)
def test_fault_inside_the_update(
    how: str, place: str, job: Callable[..., Job], baseline: Record
) -> None:
    """The torn rank takes over what the others have: step n+1 follows if one of them finished n."""
    run = job(Fault(2, place, 9, do=how))
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    assert next_steps(run) in ([9], [10])
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.RETRY
    assert "peer" in incident.sources


def test_step_that_a_replica_has_finished_is_not_done_again(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """One rank is torn when the others wait for it in the next step: that is what follows."""
    torn = Fault(2, "updated", 9, do="pause"), Fault(2, "updated", 9, do="uce")
    run = job(*torn, variant="plain")
    for rank in set(range(RANKS)) - {2}:
        run.wait_step(rank, 10)
    run.release(0)
    assert_recovered(run, baseline_of("plain"), replaced=())
    assert next_steps(run) == [10]
    assert run.incidents()[0].sources == {"self": RANKS - 1, "peer": 1}


@pytest.mark.parametrize(
    ("how", "place"),
    soak_but(
        [
            (how, at)
            for how in ("uce", "uce-temporary")
            for at in ("keep buffers", "wait", "keep state")
        ],
        ("uce", "keep buffers"),
    ),
)
def test_fault_that_shows_itself_at_the_edge_of_a_step(
    how: str, place: str, job: Callable[..., Job], baseline: Record
) -> None:
    """Before the step's body, before its update, and when it is over."""
    run = job(Fault(2, place, 9, do=how))
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    assert run.incidents()[0].strategy is Strategy.RETRY


@pytest.mark.parametrize(("rank", "place", "replaced"), [(0, "send", set()), (1, "receive", {1})])
def test_damage_while_state_is_sent(
    rank: int, place: str, replaced: set[int], job: Callable[..., Job], baseline: Record
) -> None:
    """The sender's memory breaks in the middle of the recovery, or the receiver's once more."""
    run = job(Fault(1, "forward", 9, do="uce"), Fault(rank, place, do="uce"))
    assert_recovered(run, baseline, replaced=replaced)
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert {fault.kind for fault in incident.faults} >= {Kind.DEVICE_MEMORY}


@pytest.mark.parametrize("how", soak_but(["hiccup", "uce"], "uce"))
def test_fault_that_a_retry_does_not_end(
    how: str, job: Callable[..., Job], baseline: Record
) -> None:
    """The same rank, the same step again: it is replaced, and the others stay."""
    run = job(Fault(1, "backward", 9, do=how, again=True))
    assert_recovered(run, baseline, replaced={1})
    assert steps_lost(run) == [0]
    assert [event.strategy for event in run.events_of(journal.Decided)] == [
        Strategy.RETRY,
        Strategy.RECOVER_IN_PLACE,
    ]


def test_device_that_cannot_be_repaired(job: Callable[..., Job], baseline: Record) -> None:
    """The rank itself says so when it has tried, and is replaced."""
    run = job(Fault(3, "forward", 9, do="uce-fatal"))
    assert_recovered(run, baseline, replaced={3})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert [fault.kind for fault in incident.faults if fault.rank == 3] == [
        Kind.DEVICE_MEMORY,
        Kind.DEVICE,
    ]
    assert incident.strategy is Strategy.RECOVER_IN_PLACE


def test_retry_that_is_not_allowed(job: Callable[..., Job], baseline: Record) -> None:
    """Without `retry` the next strategy of the ladder is taken."""
    policy = Policy(strategies=(Strategy.RECOVER_IN_PLACE,))
    run = job(Fault(1, "forward", 9, do="uce"), policy=policy)
    assert_recovered(run, baseline, replaced={1})
    assert steps_lost(run) == [0]


def all_at_once(job: Callable[..., Job], ranks: Collection[int], **settings: object) -> Job:
    """Damage the memory of these ranks in one step that none of them can leave before."""
    hold = [Fault(rank, "forward", 12, do="pause") for rank in range(RANKS)]
    run = job(*hold, *(Fault(rank, "forward", 12, do="uce") for rank in ranks), **settings)
    run.wait_pause(12)
    run.release_all()
    return run


def test_several_ranks_at_once(job: Callable[..., Job], baseline: Record) -> None:
    """One intact replica is enough."""
    run = all_at_once(job, (0, 1, 2))
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    assert run.incidents()[0].sources == {"self": RANKS - 3, "peer": 3}


def test_all_ranks_at_once(job: Callable[..., Job], baseline: Record) -> None:
    """With no intact replica the newest snapshot is taken; the processes stay all the same."""
    run = all_at_once(job, range(RANKS), snapshot_every=5)
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [2]
    assert run.incidents()[0].sources == {"snapshot": 1, "peer": 3}


def test_damaged_rank_and_a_killed_one(job: Callable[..., Job], baseline: Record) -> None:
    """Both in one incident: one process is replaced, the other's state is repaired."""
    run = job(Fault(1, "forward", 9, do="uce"), Fault(2, "forward", 9))
    assert_recovered(run, baseline, replaced={2})
    assert set(steps_lost(run)) == {0}


def test_rank_killed_while_a_damaged_one_takes_its_state(
    job: Callable[..., Job], baseline: Record
) -> None:
    """A fault during the recovery belongs to the same incident."""
    run = job(Fault(1, "forward", 9, do="uce"), Fault(2, "after StateReady", 9, life=1))
    assert_recovered(run, baseline, replaced={2})
    assert set(steps_lost(run)) == {0}


def test_error_of_the_script_is_not_retried(job: Callable[..., Job]) -> None:
    """What no table knows is the script's own: the job fails with it."""
    run = job(Fault(1, "forward", 9, do="raise"))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "injected into step 9" in ended.reason
