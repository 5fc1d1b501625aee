"""The fork server while it starts: it does not outlive its agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import status_of

from rekindle import names


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], tuple[subprocess.Popen[bytes], socket.socket]]:
    """Return a function that starts the fork server of an agent; it imports a module."""
    (tmp_path / "imported.py").write_text("open('imported', 'w').close()\n")

    def run(agent: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "rekindle.agent.fork_server_process"]
        command += ["--socket", str(theirs.fileno()), "--agent", str(agent)]
        command += ["--preload", "imported"]
        environment = {**os.environ, names.ENV_AGENT: "a", "PYTHONPATH": str(tmp_path)}
        with theirs:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], cwd=tmp_path
            )
        return process, ours

    return run


def test_a_fork_server_whose_agent_has_ended_imports_nothing(
    start: Callable[[int], tuple[subprocess.Popen[bytes], socket.socket]], tmp_path: Path
) -> None:
    """An agent may end before its fork server runs. Its number is an argument, so this is seen."""
    process, ours = start(1)  # not the parent of the fork server, as after the end of its agent
    with ours:
        assert status_of(process) == -signal.SIGKILL
    assert not (tmp_path / "imported").exists()


def test_a_fork_server_ends_with_its_connection(
    start: Callable[[int], tuple[subprocess.Popen[bytes], socket.socket]], tmp_path: Path
) -> None:
    """A fork server that has imported ends when the connection of its agent ends."""
    process, ours = start(os.getpid())
    ours.close()
    assert status_of(process) == 0
    assert (tmp_path / "imported").exists()
