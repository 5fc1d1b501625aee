"""Training jobs on the local engine, and uninterrupted runs for comparison."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_jobs.baselines import baseline, baseline_of
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.running import ended_of

__all__ = ["baseline", "baseline_of", "ended_of"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a job with faults; end the jobs after the test."""
    jobs: list[Job] = []

    def start(*faults: Fault, **settings: object) -> Job:
        folder = tmp_path / f"run{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, *faults, **settings).start())
        return jobs[-1]

    yield start
    for each in jobs:
        each.__exit__()
