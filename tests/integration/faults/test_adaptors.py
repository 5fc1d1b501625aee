"""MindIO's ARF without MindIO: a new process joins those of a loop with MindIO's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_jobs
from training_jobs.injection import Fault, held
from training_jobs.job import STEPS, Job
from training_jobs.record import Record

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy

SCRIPT = Path(training_jobs.__file__).with_name("adaptor.py")
RANKS = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run without faults."""
    with Job(tmp_path_factory.mktemp("run"), script=SCRIPT, processes=RANKS) as job:
        assert job.end().outcome == "succeeded", job.story()
    return job.record


def assert_recovered(job: Job, undisturbed: Record, *, replaced: set[int]) -> None:
    """All losses and parameters are those of the undisturbed run; who lives on is the same pid."""
    assert job.end().outcome == "succeeded", job.story()
    for rank in range(RANKS):
        assert job.record.losses(rank) == undisturbed.losses(rank), job.story()
        assert job.record.result(rank)["digest"] == undisturbed.result(0)["digest"]
        assert (len(job.record.lives(rank)) > 1) == (rank in replaced), f"rank {rank}"
    assert job.leftovers() == []


def calls_after_clean(job: Job, rank: int) -> list[Any]:
    """What a rank's handlers were called with, but for the stop and clean of its device."""
    calls = job.record.result(rank)["calls"]
    assert all(call == ["clean", False] for call in calls if call[0] == "clean")
    return [call for call in calls if call[0] not in ("stop", "clean")]


@pytest.mark.parametrize("place", ["forward", "update"])
def test_a_new_process_joins_the_others_in_theirs(
    place: str, job: Callable[..., Job], undisturbed: Record
) -> None:
    """Groups are formed anew on all ranks, it takes the state from a peer, and no step is lost."""
    run = job(*held(Fault(1, place, 7)), script=SCRIPT, processes=RANKS)
    done = 7 if place == "forward" else 8  # of a step that has all gradients, peers do the update
    run.release_abreast(0, done)
    assert_recovered(run, undisturbed, replaced={1})
    [decided] = run.events_of(journal.Decided)
    assert decided.strategy is Strategy.RECOVER_IN_PLACE
    rebuilt, rolled_back = ["rebuild", [1], "recover"], ["rollback", done]
    receives = ["repair", done, "RT_RECV_REPAIR", [1]]
    assert calls_after_clean(run, 1) == [rebuilt, receives, rolled_back]
    sent = []
    for rank in (0, 2):
        calls = calls_after_clean(run, rank)
        sent += calls[1:-1]
        assert (calls[0], calls[-1]) == (rebuilt, rolled_back)
        assert run.record.result(rank)["calls"][:2] == [["stop"], ["clean", False]]
    assert sent == [["repair", done, "RT_SEND", [1]]]


def test_a_rank_that_dies_while_groups_are_rebuilt(
    job: Callable[..., Job], undisturbed: Record
) -> None:
    """What then fails on the others is not their fault: two new processes join the third."""
    faults = (*held(Fault(0, "forward", 5)), Fault(2, "rebuild", 5))
    run = job(*faults, script=SCRIPT, processes=RANKS)
    run.release_abreast(0, 5)
    assert_recovered(run, undisturbed, replaced={0, 2})
    assert ["rebuild", [0, 2], "recover"] in calls_after_clean(run, 1)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_spare_joins_in_the_place_of_a_lost_node(
    lost: int, job: Callable[..., Job], undisturbed: Record
) -> None:
    """All of a node's ranks are new processes elsewhere; the others stay.

    Node 0 has had the store of all.
    """
    pause = Fault(lost, "forward", 9, do="pause")
    run = job(pause, script=SCRIPT, processes=RANKS, nodes=RANKS, spares=1)
    run.wait_fault(0)
    run.kill_node(lost)
    assert_recovered(run, undisturbed, replaced={lost})
    assert ["rebuild", [lost], "recover"] in calls_after_clean(run, 1)


def test_a_rank_is_lost_after_the_coordinator(job: Callable[..., Job], undisturbed: Record) -> None:
    """The next one has another store, and all meet there."""
    pauses = [Fault(rank, "forward", 6, do="pause") for rank in range(RANKS)]
    run = job(*pauses, script=SCRIPT, processes=RANKS)
    run.wait_pause(6)
    run.kill_coordinator()
    run.revive_coordinator()
    run.kill(1)
    run.release_all()
    assert_recovered(run, undisturbed, replaced={1})
    assert ["rebuild", [1], "recover"] in calls_after_clean(run, 0)


def test_when_nobody_is_left_all_begin_anew(job: Callable[..., Job], undisturbed: Record) -> None:
    """No new process takes itself for one that joins others."""
    pauses = [Fault(rank, "forward", 4, do="pause") for rank in range(RANKS)]
    run = job(*pauses, script=SCRIPT, processes=RANKS)
    run.wait_pause(4)
    run.kill(0, 1, 2)
    assert_recovered(run, undisturbed, replaced={0, 1, 2})
    assert max(run.record.steps(0)) == STEPS - 1
    assert all(calls_after_clean(run, rank) == [] for rank in range(RANKS))
