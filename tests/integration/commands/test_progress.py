"""The progress bar on a terminal, and the progress lines without one."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_commands import STATE, flip, place
from stores import put

import rekindle
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.files import locked
from rekindle.cli import terminal_output as bars


def on_terminal(*arguments: object, cwd: Path, interrupt: bool = False) -> tuple[int, str, str]:
    """Run the command with a terminal for standard error; return status, output and terminal."""
    ours, theirs = pty.openpty()
    path = str(Path(rekindle.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle.cli.main", "checkpoints", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "100"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    screen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        screen += piece
        if interrupt and b"copy" in screen:
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(ours)
    output, _ = process.communicate()
    return process.returncode, output, screen.decode()


def test_a_bar_on_a_terminal(store: DirectoryStore, tmp_path: Path) -> None:
    """The terminal shows bytes, rate and remaining time; standard output has only the table."""
    flip(place(store, 5) / STATE, -1)
    status, output, screen = on_terminal("verify", "store", cwd=tmp_path)
    assert status == 1
    assert "damaged" in output
    assert "\x1b" not in output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert re.search(r"verify 3 checkpoints ━+ +17\.7/17\.7 kB +[\d.]+ [kMG]B/s +0:00:00", plain)


def test_interrupted_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C leaves no traceback, restores the cursor, and leaves no complete checkpoint."""
    put(DirectoryStore(tmp_path / "store"), 3)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):  # so that the command cannot end earlier
        status, output, screen = on_terminal("pull", "store", "out", cwd=tmp_path, interrupt=True)
    assert (status, output) == (130, "")
    assert "Traceback" not in screen
    assert "interrupted" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    assert DirectoryStore(tmp_path / "out").newest().checkpoint is None


def test_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal there are lines at intervals and one at the end, none after an error."""
    monkeypatch.setattr(bars, "_LINE_S", 0.0)
    with bars.progress("copy step 3", 3000) as advance:
        advance(1000)
        advance(2000)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "copy step 3: 1 kB of 3 kB",
        "copy step 3: 3 kB of 3 kB",
        "copy step 3: 3 kB of 3 kB",
    ]
    monkeypatch.setattr(bars, "_LINE_S", 60.0)
    with pytest.raises(ValueError), bars.progress("copy", 1):
        raise ValueError
    assert capsys.readouterr().err == ""
