"""A probe finds a folder that a job cannot use, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rekindle.checkpoints import probe as probing
from rekindle.checkpoints.probe import probe
from rekindle.errors import CheckpointError, UsageError


def test_a_folder_that_works(tmp_path: Path) -> None:
    """The probe makes no folder, and leaves no file."""
    assert probe(str(tmp_path / "deep" / "er")) == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_a_place_that_never_works(tmp_path: Path, place: str) -> None:
    """The error is a mistake of the user, and says what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"another|choose|check"):
        probe(str(tmp_path / place))


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, UsageError), (errno.EIO, CheckpointError)]
)
def test_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """A full disk is a mistake. An error that may pass is none."""

    def fail(directory: int, name: str, chunks: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(probing, "write_file", fail)
    with pytest.raises(error, match=r"cannot write"):
        probe(str(tmp_path))


def test_a_missing_right_to_delete_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe returns the reason, and raises nothing."""

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert "cannot remove" in probe(str(tmp_path))
