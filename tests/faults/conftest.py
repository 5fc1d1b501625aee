"""One uninterrupted run of each script, with which all others are compared."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job
from training_jobs.record import Record


@pytest.fixture(scope="session")
def baseline_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """Return the record of the uninterrupted run of a variant, of so many ranks and steps."""
    records: dict[tuple[str, int, int], Record] = {}

    def run(variant: str, ranks: int = RANKS, steps: int = STEPS) -> Record:
        if (variant, ranks, steps) not in records:
            folder = tmp_path_factory.mktemp(variant)
            with Job(folder, variant=variant, processes=ranks, steps=steps) as job:
                assert job.end().outcome == "succeeded", job.story()
            assert_samples_once(job.record)
            records[variant, ranks, steps] = job.record
        return records[variant, ranks, steps]

    return run


@pytest.fixture(scope="session")
def baseline(baseline_of: Callable[[str], Record]) -> Record:
    """The uninterrupted run of the DDP variant."""
    return baseline_of("ddp")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job with faults; it is ended with the test."""
    jobs: list[Job] = []

    def start(*faults: Fault, **settings: object) -> Job:
        folder = tmp_path / f"run{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, *faults, **settings).start())
        return jobs[-1]

    yield start
    for each in jobs:
        each.__exit__()
