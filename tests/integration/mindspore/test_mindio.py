"""MindSpore's own retry loop and callback, upon Rekindle's mindio_ttp.

One job meets all faults. The last process of all damaged ranks has done every step; it has left its
result behind the last step, before a rank is lost.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
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

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from rekindle.runtime.protocol import InjectionKind

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
RANKS = 3
RT_SEND, RT_UCE_HIGHLEVEL = 0, 1
REPAIRED = {7: 2, 13: 0, 28: 1}  # the damaged rank by the step


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> MindSporeJob:
    """All states are damaged, then one after the other, then a rank is killed."""
    run = MindSporeJob(
        tmp_path_factory.mktemp("job"),
        ranks=RANKS,
        options=("--max-restarts", "1"),
        program=TFT_SCRIPT,
        environment={"MS_ENABLE_TFT": "{UCE:1, TTP:1}", "MINDIO_FOR_MINDSPORE": "1"},
    )
    run.hold(2)
    run.hold(STEPS, between=True)
    with run:
        run.first_pids = run.pids()
        for rank in range(RANKS):
            run.inject(rank, InjectionKind.UCE, 4)
        run.release(2)
        run.wait_event(journal.Formed, step=0, generation=run.events_of(journal.Formed)[-1])
    return run


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
