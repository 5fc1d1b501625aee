"""Commands whose standard output has no reader, for example after `head`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.checkpoints.directory import DirectoryStore


def ended(*words: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rekindle.cli.main", *words]
    # Without a buffer, argparse itself ignores output that it cannot print.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            command, stdout=writer, stderr=stderr, env=env, text=True, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("checkpoints", "ls", "--json", "store"),
        ("checkpoints", "ls", "store"),
        ("npu-check", "--json"),
        ("policy", "policy.yaml"),
    ],
    ids=" ".join,
)
def test_a_command_ends_quietly(
    words: tuple[str, ...],
    store: DirectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the reader closes the output, the command ends with SIGPIPE's status and no traceback."""
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text("{}\n")
    done = ended(*words)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_error_that_is_not_read() -> None:
    """The status is the same if standard error is the same pipe."""
    done = ended("checkpoints", "ls", "nowhere", stderr=subprocess.STDOUT)
    assert done.returncode == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks() -> None:
    """If another pipe breaks, the command shows the BrokenPipeError."""
    code = (
        "from rekindle.cli import jobs\n"
        "def broken(options): raise BrokenPipeError('another')\n"
        "jobs.npu_check = broken\n"
        "from rekindle.cli.main import main\n"
        "main(['npu-check'])\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BrokenPipeError: another" in done.stderr
