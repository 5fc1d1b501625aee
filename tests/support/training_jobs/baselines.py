"""Uninterrupted runs, for comparison with recovered runs. All workers share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from training_jobs import RANKS
from training_jobs.checks import assert_samples_once
from training_jobs.job import STEPS, Job
from training_jobs.record import Record

Baselines = Callable[..., Record]


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def baseline_of(tmp_path_factory: pytest.TempPathFactory) -> Baselines:
    """Return a function that returns the record of an uninterrupted run.

    Its arguments are the variant, the number of ranks, and the number of steps.
    """
    shared = shared_folder(tmp_path_factory, "baselines")

    return lambda variant, ranks=RANKS, steps=STEPS: recorded(shared, variant, ranks, steps)


def recorded(shared: Path, variant: str, ranks: int, steps: int) -> Record:
    """Return the record of an uninterrupted run, which the first caller makes in `shared`."""
    folder = shared / f"{variant}-{ranks}-{steps}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = Record(folder / "run", steps, ranks=ranks)
        if not record.result(ranks - 1):
            _train(folder / "run", variant, ranks, steps)
            if "-" not in variant:  # a variant with a loader logs other numbers
                assert_samples_once(record)
    return record


def _train(folder: Path, variant: str, ranks: int, steps: int) -> None:
    folder.mkdir(exist_ok=True)
    with Job(folder, variant=variant, processes=ranks, steps=steps) as job:
        assert job.end().outcome == "succeeded", job.story()


@pytest.fixture(scope="session")
def baseline(baseline_of: Baselines) -> Record:
    """Return the uninterrupted run of the DDP variant."""
    return baseline_of("ddp")
