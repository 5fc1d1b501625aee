"""Undisturbed runs that recovered ones are compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mindspore_jobs.job import MindSporeJob

Baseline = Callable[[int], MindSporeJob]


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Return a run of MindSpore alone with so many ranks: no Session, and a plain optimizer."""
    done: dict[int, MindSporeJob] = {}

    def run(ranks: int) -> MindSporeJob:
        if ranks not in done:
            folder = tmp_path_factory.mktemp(f"baseline-{ranks}")
            with MindSporeJob(folder, "--plain", ranks=ranks) as job:
                assert job.end() == 0, job.story()
            done[ranks] = job
        return done[ranks]

    return run
