"""Runs of MindSpore alone, for comparison with recovered runs. All test workers share them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable

import pytest
from training_jobs.baselines import shared_folder

from mindspore_jobs.job import MindSporeJob

Baseline = Callable[..., MindSporeJob]


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Return a function that returns a run without a Session, by ranks and script options."""
    shared = shared_folder(tmp_path_factory, "mindspore-baselines")

    def run(ranks: int, *script: str) -> MindSporeJob:
        folder = shared / "-".join([str(ranks), *(word.strip("-") for word in script)])
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            job = MindSporeJob(folder / "run", "--plain", *script, ranks=ranks)
            done = folder / "done"
            if not done.exists():
                with job:
                    assert job.end() == 0, job.story()
                done.touch()
        return job

    return run
