"""A world that shrinks when a node is lost, and grows when a node joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_pids_kept
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.rows import paused
from training_jobs.selection import soak_but
from training_jobs.worlds import assert_stream, batches, logged

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

pytestmark = pytest.mark.timeout(400)  # the first test of a job waits for its end
STEPS = 50
PAUSE_ALL = pause_all(12)


def worlds(events: Iterable[journal.AnyEvent]) -> list[int]:
    """Return the sizes of the formed worlds."""
    return [event.world_size for event in events if isinstance(event, journal.Formed)]


def shrink_and_grow(job: Job, number: int) -> None:
    """Lose node 1, let the other ranks train, and start a node when rank 0 holds."""
    job.wait_pause(12, first=number)
    job.kill_node(1)
    job.release_all(number)
    job.wait_fault(number + RANKS)
    job.bring(1)


def lose_with_engine(job: Job) -> None:
    """Lose node 0; from then on the engine starts the requested nodes."""
    job.replaces = True
    job.kill_node(0)


def kill_in_full_world(job: Job, number: int) -> None:
    """Kill a rank after the first step of the larger world; before it, the world would shrink."""
    job.wait_fault(number)
    formed = job.events_of(journal.Formed)[-1]
    job.wait_event(journal.FirstStep, generation=formed.generation)
    job.kill(3)


def lose_for_good(job: Job, node: int, number: int, step: int) -> None:
    """Lose a node without a replacement."""
    job.wait_pause(step, first=number)
    job.replaces = False
    job.kill_node(node)
    job.release_all(number)


def is_lost_node(_: Ended, incident: journal.Incident) -> None:
    """Check that the fault is the loss of the node."""
    assert incident.cause.kind is FaultKind.NODE_LOST


SHRINK = {"strategies": (Strategy.SHRINK,), "check": is_lost_node}
GROWS = Row(
    "shrinks and grows",
    12,
    (*pause_all(12, life=0), Fault(0, "forward", 18, life=0, do="hold")),
    shrink_and_grow,
    replaced={2, 3},
    **SHRINK,
)
ENGINE = paused(
    "the engine brings the node",
    24,
    lose_with_engine,
    more=[Fault(2, "forward", 28, life=0, do="hold")],
    replaced={0, 1},
    **SHRINK,
)
IN_FULL_WORLD = Row(
    "killed in the world that has grown",
    31,
    (Fault(3, "backward", 32, life=0, do="pause"),),
    kill_in_full_world,
    replaced={3},
)
FAILS = Row(
    "fails in the small world",
    36,
    (*pause_all(36, life=0), Fault(0, "forward", 39, life=0, do="raise")),
    lambda job, number: lose_for_good(job, 1, number, 36),
)
SHRINKS = Row(
    "shrinks for good",
    44,
    tuple(pause_all(44, life=0)),
    lambda job, number: lose_for_good(job, 0, number, 44),
    **SHRINK,
)


PLAN = Plan(
    "shrinks and grows",
    (
        Attempt((GROWS, ENGINE, IN_FULL_WORLD, FAILS), outcome="failed", replaces=False),
        Attempt((SHRINKS,)),
    ),
    steps=STEPS,
    settings={"nodes": 2, "min_nodes": 1, "checkpoint_every": 5},
)


@pytest.fixture(scope="module")
def attempts(ended_of: EndedOf) -> tuple[Ended, Ended]:
    """Run a job that shrinks and grows, fails in a small world, and continues in the full one."""
    ended = ended_of(PLAN)
    return ended.only(0), ended.only(1)


@pytest.mark.parametrize("row", [GROWS, ENGINE, IN_FULL_WORLD], ids=str)
def test_the_world_shrinks_and_grows(row: Row, attempts: tuple[Ended, Ended]) -> None:
    """The other ranks continue from the same step; a new node joins them between two steps."""
    attempts[0].check(row)


def test_sizes_of_the_batches(attempts: tuple[Ended, Ended]) -> None:
    """Each world trains on the samples of its ranks, starting with the step in which it forms."""
    first, _ = attempts
    assert worlds(first.events) == [4, 2, 4, 2, 4, 4, 2]
    sizes = [len(batch) for batch in batches(first.job.record)]
    assert sizes[:18] == [16] * 12 + [8] * 6
    assert sizes[20:28] == [16] * 4 + [8] * 4
    assert sizes[30:36] == [16] * 6


def test_start_with_fewer_nodes_is_resumed_with_more(attempts: tuple[Ended, Ended]) -> None:
    """A job that failed in a small world continues in the full one from the same position."""
    first, second = attempts
    first.check_ends()
    step, sources = second.began()
    assert (step > 30, sources) == (True, {"checkpoint": RANKS})
    assert worlds(second.events) == [4, 2]


def test_the_world_shrinks(attempts: tuple[Ended, Ended], baseline_of: Baselines) -> None:
    """Without its node the world continues with half the ranks to the end."""
    _, second = attempts
    second.check(SHRINKS)
    second.check_ends()
    record = second.job.record
    assert [len(batch) for batch in batches(record)][40:] == [16] * 4 + [8] * 6
    assert_stream(record)
    results = [record.result(rank) for rank in (2, 3)]
    assert len({result["digest"] for result in results}) == 1
    assert {result["position"] for result in results} == {sum(map(len, batches(record)))}
    assert [result["pid"] for result in results] == [record.lives(rank)[-1] for rank in (2, 3)]
    baseline = baseline_of("ddp", steps=40)
    for rank in range(RANKS):
        assert record.losses(rank)[:12] == baseline.losses(rank)[:12]


@pytest.mark.parametrize("node", soak_but([0, 3], 3))
def test_the_global_batch_is_kept(
    node: int, job: Callable[..., Job], baseline_of: Baselines
) -> None:
    """Three ranks do the shares of four, with their samples and random streams.

    The training is the same within rounding: only the order of the gradients' sum differs.
    """
    first = min({0, 1} - {node})
    run = job(
        *PAUSE_ALL,
        Fault(first, "forward", 18, do="hold"),
        variant="parts",
        nodes=RANKS,
        min_nodes=2,
        replaces=False,
    )
    baseline = baseline_of("parts")
    run.wait_pause(12)
    run.kill_node(node)
    run.release_all()
    run.wait_fault(4)
    run.bring(node)
    ended = run.end()
    assert ended.outcome == "succeeded", run.story()
    assert worlds(run.events()) == [4, 3, 4]
    assert [sorted(batch) for batch in batches(run.record)] == [
        sorted(batch) for batch in batches(baseline)
    ]
    assert_pids_kept(run.record, replaced={node})
    losses, wanted = ([sum(s) for s in logged(r, "loss")] for r in (run.record, baseline))
    assert losses[:12] == wanted[:12]
    assert losses[12:] == pytest.approx(wanted[12:], rel=1e-3)
    assert len({run.record.result(rank)["digest"] for rank in range(RANKS)}) == 1
    assert run.leftovers() == []
