"""Loaders keep their position through faults: the position counts trained samples."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import pytest
from training_jobs import BATCH, RANKS
from training_jobs.checks import assert_pids_kept, assert_same_training, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.loaders import EPOCH, SAMPLES, SIZES, numbers_of
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

STREAMS = ("stream", "torchdata")
ELASTIC = ["map-0", "stream-0", "torchdata-2"]


def worlds(run: Job) -> list[int]:
    """Return the sizes of the formed worlds."""
    return [event.world_size for event in run.events_of(journal.Formed)]


def trained(record: Record) -> list[list[int]]:
    """Return the samples of each step, of all ranks in the last world that did it."""
    lines = [line for rank in range(record.ranks) for line in record.lines(rank)]
    found = []
    for step in range(record.total):
        mine = [line for line in lines if line["step"] == step]
        last = max(line["generation"] for line in mine)
        # If a rank has several records, the last one counts.
        by_rank = {each["rank"]: each["metrics"] for each in mine if each["generation"] == last}
        found.append(list(itertools.chain(*(each["samples"] for each in by_rank.values()))))
    return found


def assert_once(run: Job) -> None:
    """Check that each epoch has each sample exactly once."""
    seen = list(itertools.chain(*trained(run.record)))
    kind = run.spec.arguments[2].partition("-")[0]
    if kind in ("map", "kept"):  # a sampler's epochs have no numbers and follow each other
        seen = [place // SAMPLES * EPOCH + number for place, number in enumerate(seen)]
    twice = [number for number, count in collections.Counter(seen).items() if count > 1]
    assert twice == []
    epochs = [{n % EPOCH for n in seen if n // EPOCH == e} for e in range(max(seen) // EPOCH + 1)]
    whole = len(seen) // SAMPLES
    whole -= 2 if kind in STREAMS else 0  # readers can be up to two epochs apart
    assert whole > 0, "too few samples to tell"
    for each in epochs[:whole]:
        assert each == set(range(SAMPLES))
    if kind in STREAMS:  # check the part of a stream that is still being read for left-out samples
        for each, part in itertools.product(epochs, range(len(SIZES))):
            numbers = [number for number in numbers_of(part) if number in each]
            assert numbers == list(numbers_of(part)[: len(numbers)])


def assert_ended(run: Job) -> None:
    """Check that the job succeeded and left no process, including those of loaders."""
    ended = run.end()
    assert ended.outcome == "succeeded", f"{ended}{run.story()}"
    assert run.leftovers() == []


@pytest.mark.parametrize(
    "variant",
    soak_but(["map-2", "kept-2", "stream-2", "stateful-0", "stateful-2"], "stateful-2"),
)
def test_the_world_stays(variant: str, job: Callable[..., Job]) -> None:
    """Killed ranks and workers, and a new attempt change no sample and no bit in any step.

    The loss of a loader's worker is a fault of a process: only its rank gets a new process.
    """
    settings = {"variant": variant, "processes": 2, "steps": 40, "snapshot_every": 4}
    whole = job(**settings)
    assert_ended(whole)
    assert_once(whole)
    lost = [Fault(1, "forward", 15, life=2, do="worker")] if variant.endswith("2") else []
    run = job(
        Fault(1, "forward", 0),
        Fault(0, "backward", 9),
        *lost,
        Fault(1, "updated", 27, life=2 + len(lost)),
        Fault(0, "forward", 33, life=2, do="raise"),
        checkpoint_every=10,
        **settings,
    )
    assert run.end().outcome == "failed"
    assert set(steps_lost(run)) <= {0}
    *recovered, failed = run.incidents()
    assert len(recovered) == 3 + len(lost)
    assert all(incident.closed for incident in recovered)
    assert {incident.cause.kind for incident in recovered} == {FaultKind.PROCESS}
    assert {incident.strategy for incident in recovered} == {Strategy.RECOVER_IN_PLACE}
    assert not failed.closed
    run.plan()
    run.start()
    assert_ended(run)
    ended, resumed = run.events_of(journal.Ended)[0], run.events_of(journal.Restored)[-1]
    [formed] = [e for e in run.events_of(journal.Formed) if e.generation == resumed.generation]
    assert run.incidents()[-1].steps_lost == ended.finished - formed.step > 0
    assert_same_training(run.record, whole.record)
    for rank in range(2):
        wanted = whole.record.steps(rank)
        for line in run.record.lines(rank):  # also of steps that broke
            assert line["metrics"]["samples"] == wanted[line["step"]]["samples"], f"{rank}: {line}"


@pytest.mark.parametrize("variant", soak_but(ELASTIC, "torchdata-2"))
def test_the_world_shrinks_and_grows(variant: str, job: Callable[..., Job]) -> None:
    """With four ranks, three, and four again each epoch has each sample once."""
    run = job(
        *pause_all(12),
        Fault(0, "forward", 18, do="hold"),
        variant=variant,
        nodes=RANKS,
        min_nodes=2,
        steps=40,
        replaces=False,
    )
    run.wait_pause(12)
    run.kill_node(2)
    run.release_all()
    run.wait_fault(4)
    run.bring(2)
    assert_ended(run)
    assert worlds(run) == [4, 3, 4]
    assert_once(run)
    assert {len(samples) for samples in trained(run.record)} == {4 * BATCH, 3 * BATCH}
    assert_pids_kept(run.record, replaced={2})
    assert set(steps_lost(run)) <= {0}


def test_another_attempt_has_another_world(job: Callable[..., Job]) -> None:
    """A stream's position in a checkpoint of two ranks is valid for three ranks."""
    settings = {"variant": "stream-2", "processes": 2, "steps": 45, "snapshot_every": 0}
    run = job(Fault(0, "forward", 23, do="raise"), checkpoint_every=10, **settings)
    assert run.end().outcome == "failed"
    run.plan()
    run.record.ranks = 3
    run.start(processes_per_node=3)
    assert_ended(run)
    assert {len(samples) for samples in trained(run.record)} == {2 * BATCH, 3 * BATCH}
    assert_once(run)
