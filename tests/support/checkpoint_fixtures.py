"""Fixtures: `rekindle checkpoints` in this process, and a store of real states."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_commands import Checkpoints, Done, Trained

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.cli.main import main


@pytest.fixture
def checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Checkpoints:
    """Return a function that runs `rekindle checkpoints` in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))

    def run(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoints", *map(str, arguments)])
        output = capfd.readouterr()
        return Done(int(ended.value.code or 0), output.out, output.err)

    return run


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """Return a store, in the folder `store`, with checkpoints of the steps 5, 10 and 15."""
    found = DirectoryStore(tmp_path / "store")
    for step in (5, 10, 15):
        Trained(step).keep(found, step)
    return found
