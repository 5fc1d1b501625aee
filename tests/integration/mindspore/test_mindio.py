"""MindSpore's own retry loop and callback, with Rekindle's mindio_ttp.

One job has all faults. The last process of each damaged rank has done every step. It has written
its result after the last step, before a rank is lost.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import (
    STEPS,
    TFT_SCRIPT,
    MindSporeJob,
    assert_same_results,
    needs_mindspore,
)
from mindspore_jobs.rows import Ended, Row, meet

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
RANKS = 3
RT_SEND, RT_UCE_HIGHLEVEL = 0, 1
# All states are damaged: no handler can repair them, and new processes start with the state that
# their script loads. Later one rank after the other is damaged, and gets its parameters from a
# peer.
RESTART = Row(
    "all states damaged",
    2,
    InjectionKind.UCE,
    (0, 1, 2),
    strategy=Strategy.RESTART,
    first=Strategy.RETRY,
    back_to=0,
)
REPAIRS = {
    7: Row("state of rank 2 damaged", 6, InjectionKind.UCE, (2,)),
    13: Row("state of rank 0 damaged", 12, InjectionKind.UCE, (0,)),
    28: Row("state of rank 1 damaged", 27, InjectionKind.UCE, (1,)),
}
DAMAGED = {7: 2, 13: 0, 28: 1}
ROWS = [RESTART, *REPAIRS.values()]


def lose_a_rank(job: MindSporeJob) -> None:
    """Kill a rank after the last step, when no restart is left."""
    job.wait(lambda: all(r.finished == STEPS for r in job.status().ranks), "the last step")
    os.kill(job.pids()[1], signal.SIGKILL)
    assert job.end() != 0, job.story()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the job after all faults."""
    job = MindSporeJob(
        tmp_path_factory.mktemp("job"),
        ranks=RANKS,
        options=("--max-restarts", "1"),
        program=TFT_SCRIPT,
        environment={"MS_ENABLE_TFT": "{UCE:1, TTP:1}", "MINDIO_FOR_MINDSPORE": "1"},
    )
    job.hold(STEPS, between=True)
    return meet(job, ROWS, end=lose_a_rank)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_damaged_states(ended: Ended, row: Row) -> None:
    ended.check(row)


@pytest.mark.parametrize(("number", "step"), enumerate(REPAIRS))
def test_handlers_are_called_as_in_mindspore(ended: Ended, number: int, step: int) -> None:
    """All ranks stop, clean and roll back; the damaged rank and one peer repair."""
    damaged, calls, sources = DAMAGED[step], {}, []
    for rank, result in ended.job.results().items():
        calls[rank] = split_by_stop(result["calls"])[number]
        assert calls[rank][:2] == [["stop", False, True], ["clean", rank == damaged, "retry"]]
        assert calls[rank][-1] == ["rollback", step]
        if calls[rank][2:-1] and rank != damaged:
            sources.append(rank)
            assert calls[rank][2:-1] == [repaired(step, RT_SEND, source=rank, target=damaged)]
    expected = repaired(step, RT_UCE_HIGHLEVEL, source=sources[0], target=damaged)
    assert (len(sources), calls[damaged][2:-1]) == (1, [expected])


def test_the_training_is_that_of_an_undisturbed_run(ended: Ended, baseline: Baseline) -> None:
    if ended.error is not None:
        raise ended.error
    assert_same_results(ended.job, baseline(RANKS))
    assert {len(result["seen"]) for result in ended.job.results().values()} == {STEPS}


def test_a_lost_rank_has_the_others_save_their_state(ended: Ended) -> None:
    """A rank that must end calls MindSpore's own handlers, which save the newest step.

    One rank of the node does that. Another rank may start a second checkpoint, which never gets its
    final name.
    """
    folder = ended.job.folder
    (saved,) = folder.glob("ttp_saved_checkpoints-step_*[0-9]/*/*")
    names = [
        f"ttp_saved_checkpoints-step_30/rank_{rank}/ttp_rank_{rank}-3_10.ckpt" for rank in (0, 2)
    ]
    assert str(saved.relative_to(folder)) in names, ended.job.story()


def repaired(step: int, kind: int, *, source: int, target: int) -> list[Any]:
    """Return the expected call of a repair handler."""
    info = {
        "type": [0],
        "repair_type": kind,
        "src": [source],
        "dst": [target],
        "rank_list": sorted((source, target)),
    }
    return ["repair", step, kind == RT_UCE_HIGHLEVEL, [target], info]


def split_by_stop(calls: list[Any]) -> list[list[Any]]:
    """Return the calls of each recovery."""
    found: list[list[Any]] = []
    for call in calls:
        if call[0] == "stop":
            found.append([])
        found[-1].append(call)
    return found
