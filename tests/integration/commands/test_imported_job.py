"""A training job continues from an exported and imported checkpoint, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_commands import Checkpoints
from training_jobs.job import Job

from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run a job without an interruption."""
    with Job(tmp_path_factory.mktemp("first"), processes=2, checkpoint_every=10) as job:
        assert job.end().outcome == "succeeded", job.story()
        yield job


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_a_job_continues_from_an_import(
    form: str, first: Job, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """The losses after the import equal those of the uninterrupted run, bit by bit."""
    (tmp_path / "second").mkdir()
    second = Job(tmp_path / "second", processes=2, checkpoint_every=10)
    store = first.spec.checkpoint_store
    done = checkpoints("export", store, "out", "--format", form, "--step", 10)
    assert done.status == 0, done.err
    done = checkpoints("import", "out", second.spec.checkpoint_store, "--job-id", "job")
    assert done.status == 0, done.err
    with second:
        assert second.end().outcome == "succeeded", second.story()
    formed = second.events_of(journal.Formed)[0]
    assert formed.step == 10
    assert formed.sources.keys() <= {"checkpoint", "peer"}
    for rank in range(2):
        assert second.record.losses(rank) == first.record.losses(rank)[10:]
        ours, theirs = second.record.result(rank), first.record.result(rank)
        for name in ("digest", "position", "rate", "updates"):
            assert ours[name] == theirs[name]
    kept = checkpoints("ls", second.spec.checkpoint_store).out.splitlines()[1:]
    assert [line.split()[:2] for line in kept] == [["24", "1"], ["20", "1"], ["10", "0"]]
