"""A world that shrinks when a node is lost, and grows when one comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from training_jobs import LENGTH, RANKS
from training_jobs.checks import assert_pids_kept, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Strategy
from rekindle.training.sampler import StepSampler

PAUSE_ALL = pause_all(12)


def worlds(run: Job) -> list[int]:
    """The sizes of the worlds that were formed."""
    return [event.world_size for event in run.events_of(journal.Formed)]


def logged(record: Record, name: str) -> list[list[Any]]:
    """What was logged of each step in the world that did it last, in the order of its ranks."""
    lines = [line for rank in range(RANKS) for line in record.lines(rank)]
    found = []
    for step in range(record.total):
        mine = [line for line in lines if line["step"] == step]
        last = max(line["generation"] for line in mine)
        # Of several records of a rank the last one counts: it logs as its parts are done.
        by_rank = {
            line["rank"]: line["metrics"][name] for line in mine if line["generation"] == last
        }
        found.append([by_rank[rank] for rank in sorted(by_rank)])
    return found


def batches(record: Record) -> list[list[int]]:
    """The samples of each step."""
    return [list(itertools.chain(*step)) for step in logged(record, "samples")]


def assert_stream(record: Record) -> None:
    """All steps together have seen the stream from its beginning, no sample lost or twice."""
    seen = [sample for batch in batches(record) for sample in batch]
    sampler = StepSampler(LENGTH, 1, seed=3)
    sampler.bind(0, 1)
    for sample in seen:
        assert [sample] == sampler.indices()
        sampler.advance()


def assert_went_on(run: Job, *, replaced: set[int]) -> None:
    """The job ended well with equal states, kept its healthy processes and left nothing."""
    ended = run.end()
    assert ended.outcome == "succeeded", f"{ended}{run.story()}"
    results = [run.record.result(rank) for rank in range(RANKS)]
    assert len({result["digest"] for result in results}) == 1
    assert {result["position"] for result in results} == {sum(map(len, batches(run.record)))}
    assert_stream(run.record)
    assert_pids_kept(run.record, replaced=replaced)
    assert set(steps_lost(run)) <= {0}
    assert run.leftovers() == []
    assert all(incident.closed for incident in run.incidents()), run.story()


@pytest.mark.parametrize("node", soak_but([0, 1], 0))
def test_the_world_shrinks(node: int, job: Callable[..., Job], baseline: Record) -> None:
    """Without its node the world goes on at once, from the very step, with half the ranks."""
    run = job(*PAUSE_ALL, nodes=2, min_nodes=1, replaces=False)
    run.wait_pause(12)
    run.kill_node(node)
    run.release_all()
    ended = run.end()
    assert ended.outcome == "succeeded", run.story()
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.strategy) == (Kind.NODE_LOST, Strategy.SHRINK)
    assert (worlds(run), steps_lost(run)) == ([4, 2], [0])
    assert [len(batch) for batch in batches(run.record)] == [16] * 12 + [8] * 12
    assert_stream(run.record)
    left = {0, 1, 2, 3} - {2 * node, 2 * node + 1}
    assert_pids_kept(run.record, replaced={0, 1, 2, 3} - left)
    assert len({run.record.result(rank)["digest"] for rank in left}) == 1
    for rank in range(RANKS):
        assert run.record.losses(rank)[:12] == baseline.losses(rank)[:12]
    assert run.leftovers() == []


@pytest.mark.parametrize("node", soak_but([0, 1], 1))
def test_the_world_grows_again(node: int, job: Callable[..., Job]) -> None:
    """A node that comes while the others train is taken in between two steps."""
    held = 1 - node
    run = job(
        *PAUSE_ALL,
        Fault(2 * held, "forward", 18, do="hold"),
        nodes=2,
        min_nodes=1,
        replaces=False,
    )
    run.wait_pause(12)
    run.kill_node(node)
    run.release_all()
    run.wait_fault(4)
    run.bring(node)
    assert_went_on(run, replaced={2 * node, 2 * node + 1})
    assert worlds(run) == [4, 2, 4]
    sizes = [len(batch) for batch in batches(run.record)]
    assert sizes[:12] == [16] * 12
    assert sizes[-1] == 16
    assert len(run.incidents()) == 1


def test_the_engine_brings_the_node(job: Callable[..., Job]) -> None:
    """Nobody has to ask: the lost node is wanted, comes, and is taken in; faults go on."""
    run = job(
        *PAUSE_ALL,
        Fault(0, "forward", 20, do="hold"),
        Fault(3, "backward", 22, do="pause", life=2),
        nodes=2,
        min_nodes=1,
    )
    run.wait_pause(12)
    run.kill_node(1)
    run.release_all()
    run.wait_fault(len(PAUSE_ALL) + 1)
    run.wait_event(journal.FirstStep, generation=3)  # a node that breaks before is left out again
    run.kill(3)
    assert_went_on(run, replaced={2, 3})
    assert worlds(run)[:3] == [4, 2, 4]


def test_start_with_fewer_nodes_is_resumed_with_more(job: Callable[..., Job]) -> None:
    """A job that failed in a small world goes on in the full one: the position means the same."""
    faults = (*PAUSE_ALL, Fault(0, "forward", 18, do="raise"))
    run = job(*faults, nodes=2, min_nodes=1, replaces=False, checkpoint_every=5)
    run.wait_pause(12)
    run.kill_node(1)
    run.release_all()
    assert run.end().outcome == "failed"
    run.plan()
    run.start()
    ended = run.end()
    assert ended.outcome == "succeeded", run.story()
    assert worlds(run) == [4, 2, 4]
    assert_stream(run.record)


@pytest.mark.parametrize("node", soak_but([0, 3], 3))
def test_the_global_batch_is_kept(node: int, job: Callable[..., Job], baseline_of) -> None:
    """Three ranks do the shares of four, with their samples and random streams: the same training.

    But for the order in which gradients are summed: its rounding is all that differs.
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
    assert worlds(run) == [4, 3, 4]
    assert [sorted(batch) for batch in batches(run.record)] == [
        sorted(batch) for batch in batches(baseline)
    ]
    assert_pids_kept(run.record, replaced={node})
    losses, wanted = ([sum(s) for s in logged(r, "loss")] for r in (run.record, baseline))
    assert losses[:12] == wanted[:12]
    assert losses[12:] == pytest.approx(wanted[12:], rel=1e-3)
    assert len({run.record.result(rank)["digest"] for rank in range(RANKS)}) == 1
    assert run.leftovers() == []
