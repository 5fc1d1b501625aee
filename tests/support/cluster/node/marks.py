"""Find all processes of a container, also those with their own session.

A process has the mark of its container in its environment, and its child processes inherit it.
`python -m cluster.node.marks MARK` waits until its standard input ends, and then ends all processes
with that mark. So no process remains after a kubelet is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

NAME = "SIMULATED_CONTAINER"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def found(mark: str) -> list[int]:
    """Return the ids of the processes whose mark starts with this text."""
    wanted = f"{NAME}={mark}".encode()
    processes = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes().split(b"\0")
                if any(each.startswith(wanted) for each in environment):
                    processes.append(int(entry.name))
    return processes


def sweep(mark: str) -> bool:
    """Kill the processes with this mark, and return whether there were any."""
    processes = found(mark)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(processes)


def sweep_all(mark: str) -> None:
    for _ in range(500):
        if not sweep(mark):
            return
        time.sleep(0.01)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Call this in the child before exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep_all(sys.argv[1])
