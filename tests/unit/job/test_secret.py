"""The secret in a job's directory."""

from __future__ import annotations

from pathlib import Path

from rekindle import names
from rekindle.job.spec import EntryKind, JobDirectory, JobSpec


def test_which_secret_a_job_has(tmp_path: Path) -> None:
    """A given one counts. Otherwise an earlier one stays, unless it keeps nobody out."""
    directory = JobDirectory(tmp_path / "job")
    spec = JobSpec(
        job_id="job",
        entry=EntryKind.SCRIPT,
        target="train.py",
        working_directory="/work",
        directory=str(directory.path),
        log_directory=str(directory.path / "logs"),
        checkpoint_store="/store",
    )

    def created(secret: str = "") -> str:
        directory.create(spec, secret=secret)
        assert (directory.path / names.SECRET_FILE).stat().st_mode & 0o777 == 0o600
        return directory.secret()

    random = created()
    assert len(random) == 64
    assert created() == random
    assert created("of the user") == "of the user"
    assert created() == "of the user"
    assert created(names.NO_SECRET) == names.NO_SECRET
    assert created() not in (names.NO_SECRET, random)
