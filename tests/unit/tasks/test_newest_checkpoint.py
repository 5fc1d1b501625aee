"""The checkpoint folder of an evaluation, for each location of the job's checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from jobs.driver import spec_of
from stores import put
from stores.servers import ENVIRONMENT, rclone

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.open_store import open_store
from rekindle.errors import CheckpointError
from rekindle.job.spec import JobDirectory
from rekindle.tasks import retraining
from rekindle.tasks.retraining import newest_checkpoint


def directory_of(folder: Path, location: str) -> JobDirectory:
    """Create a job whose checkpoints are at `location`."""
    directory = JobDirectory(folder / "job")
    changes = {"log_directory": str(folder / "logs"), "checkpoint_store": location}
    directory.create(msgspec.structs.replace(spec_of(nodes=1, processes=1), **changes))
    return directory


@pytest.mark.process
def test_in_an_object_store(tmp_path: Path) -> None:
    """newest_checkpoint() downloads a checkpoint with the credentials of the job.

    It pins the checkpoint during the use. Only the newest download stays.
    """
    with rclone(tmp_path / "s3") as server:
        job = directory_of(tmp_path, server.location("job"))
        store = open_store(job.spec().checkpoint_store, ENVIRONMENT)
        for step in (1, 2):
            put(store, step)
            for _ in range(2):
                with newest_checkpoint(job, ENVIRONMENT, step=step) as found:
                    folder = Path(found.location)
                    kept = {pin.key for pin in store.pins()}
            assert kept == {(step, 1)}
        assert store.pins() == []
    assert folder.name == "step-0000000002-g000001"
    assert [key[0] for key in DirectoryStore(folder.parent).keys()] == [2]  # noqa: SIM118


def test_in_a_folder(tmp_path: Path) -> None:
    """newest_checkpoint() returns a checkpoint of a folder without a copy."""
    put(DirectoryStore(tmp_path / "kept"), 1)
    with newest_checkpoint(directory_of(tmp_path, str(tmp_path / "kept")), {}, step=1) as found:
        assert Path(found.location).parent == tmp_path / "kept"


def test_there_is_none(tmp_path: Path) -> None:
    """Without a checkpoint, the error states the setting that enables checkpoints."""
    with (
        pytest.raises(CheckpointError, match=r"give checkpoint\.every"),
        newest_checkpoint(directory_of(tmp_path, str(tmp_path / "kept")), {}, step=1),
    ):
        pass


def test_it_is_older_than_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """newest_checkpoint() returns a checkpoint that is older than the last step, with a warning.

    The job may have ended early.
    """
    monkeypatch.setattr(retraining, "get_run_logger", lambda: logging.getLogger("test"))
    put(DirectoryStore(tmp_path / "kept"), 1)
    with newest_checkpoint(directory_of(tmp_path, str(tmp_path / "kept")), {}, step=2) as found:
        assert found.manifest.step == 1
    assert "has finished step 2, but its newest checkpoint has step 1" in caplog.text
