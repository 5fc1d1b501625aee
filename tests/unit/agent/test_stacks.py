"""Stacks of ranks: the files of Rekindle that show a wait, and a py-spy that does not run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from repository import ROOT

from rekindle.agent import stacks

OURS = sorted(p for p in {*stacks._WAITS, *stacks._WRAPPERS} if p.startswith("training/"))


@pytest.mark.parametrize("path", OURS)
def test_a_file_by_which_a_wait_is_known_exists(path: str) -> None:
    """Each file name that identifies a wait is the name of an existing file of Rekindle."""
    assert (ROOT / "rekindle" / path).is_file()


def test_some_file_is_ours() -> None:
    assert OURS


@pytest.mark.process
def test_a_py_spy_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If py-spy cannot run, the agent returns an empty stack and prints the reason."""
    tool = tmp_path / "py-spy"
    tool.write_text("no program")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(tool))
    assert asyncio.run(stacks.dump(os.getpid(), 1.0)) == ""
    assert f"Rekindle cannot run {tool}" in capfd.readouterr().err
