"""MindSpore's own retry loop and callback, upon Rekindle's mindio_ttp."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindspore_jobs.job import (
    STEPS,
    TFT_SCRIPT,
    MindSporeJob,
    assert_same_results,
    needs_mindspore,
)

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from rekindle.runtime.protocol import InjectionKind

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
Baseline = Callable[[int], MindSporeJob]
RT_SEND, RT_UCE_HIGHLEVEL = 0, 1


def tft_job(folder: Path, *script: str, ranks: int, options: tuple[str, ...] = ()) -> MindSporeJob:
    """Return a job whose script is `tft_train`."""
    environment = {"MS_ENABLE_TFT": "{UCE:1, TTP:1}", "MINDIO_FOR_MINDSPORE": "1"}
    return MindSporeJob(
        folder,
        *script,
        ranks=ranks,
        options=options,
        program=TFT_SCRIPT,
        environment=environment,
    )


def repaired(step: int, kind: int, *, source: int, target: int) -> list[Any]:
    """What a repair handler has been called with."""
    info = {
        "type": [0],
        "repair_type": kind,
        "src": [source],
        "dst": [target],
        "rank_list": sorted((source, target)),
    }
    return ["repair", step, kind == RT_UCE_HIGHLEVEL, [target], info]


def test_its_retry_loop_repairs_ranks_in_their_processes(
    tmp_path: Path, baseline: Baseline
) -> None:
    """Damaged ranks take their parameters from peers; all losses are the undisturbed run's."""
    faults = {7: 2, 13: 0, 28: 3}
    with tft_job(tmp_path, ranks=4) as job:
        job.hold(2)
        pids = job.pids()
        for step, rank in faults.items():
            job.inject(rank, InjectionKind.UCE, step)
        job.release(2)
        assert job.end() == 0, job.story()
    decided = [each.strategy for each in job.events_of(journal.Decided)]
    assert decided == [Strategy.RETRY] * 3, job.story()
    assert {incident.steps_lost for incident in job.incidents()} == {0}  # one may hold two of them
    results = job.results()
    assert [results[rank]["pid"] for rank in range(4)] == pids
    assert_same_results(job, baseline(4))
    assert all(len(results[rank]["seen"]) == STEPS for rank in range(4))
    for number, (step, damaged) in enumerate(faults.items()):
        sources = []
        for rank in range(4):
            calls = split_by_stop(results[rank]["calls"])[number]
            assert calls[:2] == [["stop", False, True], ["clean", rank == damaged, "retry"]]
            assert calls[-1] == ["rollback", step]
            if calls[2:-1] and rank != damaged:
                sources.append(rank)
                assert calls[2:-1] == [repaired(step, RT_SEND, source=rank, target=damaged)]
        calls = split_by_stop(results[damaged]["calls"])[number]
        expected = repaired(step, RT_UCE_HIGHLEVEL, source=sources[0], target=damaged)
        assert (len(sources), calls[2:-1]) == (1, [expected])


def split_by_stop(calls: list[Any]) -> list[list[Any]]:
    """The calls of each recovery."""
    found: list[list[Any]] = []
    for call in calls:
        if call[0] == "stop":
            found.append([])
        found[-1].append(call)
    return found


def test_when_all_states_are_damaged_all_ranks_are_started_anew(
    tmp_path: Path, baseline: Baseline
) -> None:
    """No handler can repair them: new processes begin with what their script loads."""
    with tft_job(tmp_path, ranks=2, options=("--max-restarts", "1")) as job:
        job.hold(2)
        pids = job.pids()
        for rank in (0, 1):
            job.inject(rank, InjectionKind.UCE, 13)
        job.release(2)
        assert job.end() == 0, job.story()
    results = job.results()
    assert not {results[rank]["pid"] for rank in (0, 1)} & set(pids)
    assert_same_results(job, baseline(2))


def test_a_lost_rank_has_the_others_save_their_state(tmp_path: Path) -> None:
    """One that is told to end calls MindSpore's own handlers: a checkpoint of the newest step."""
    with tft_job(tmp_path, ranks=2, options=("--max-restarts", "0")) as job:
        job.hold(17, between=True)
        pids = job.pids()
        job.wait(lambda: min(rank.finished for rank in job.status().ranks) >= 17, "step 17")
        os.kill(pids[1], signal.SIGKILL)
        assert job.end() != 0
    (saved,) = tmp_path.glob("ttp_saved_checkpoints-*/*/*")
    assert saved.relative_to(tmp_path) == Path(
        "ttp_saved_checkpoints-step_17/rank_0/ttp_rank_0-2_7.ckpt"
    ), job.story()
