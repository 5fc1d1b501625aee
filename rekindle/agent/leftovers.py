"""Ends the processes that a rank leaves behind when it ends.

Processes of the rank's session end with it. The exceptions are processes that remove shared
resources after the end of their users: Python's resource tracker and torch's manager of shared
memory. They end soon themselves, because their last user has ended.

A helper in a session of its own, such as a server that the script starts, becomes a child of the
agent. It could keep a port or memory of a device that the next process of the rank needs. Its
environment shows which process of which rank started it.

A killed process does not remove the temporary folder of its multiprocessing (`pymp-*`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from rekindle import names

# The limit for the end of helpers after SIGKILL. The next process of the rank waits for it.
GONE_S = 2.0
_TICK_S = 0.002
_PROC = Path("/proc")
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def marks_of(environment: Mapping[str, str]) -> frozenset[bytes]:
    """Return the variables that identify one process of a rank; its helpers inherit them."""
    return frozenset(f"{name}={environment[name]}".encode() for name in names.RANK_MARKS)


def has_marks(pid: int, marks: Collection[bytes]) -> bool:
    """Return whether a process got all of these variables at its start."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        found = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return set(marks) <= set(found)
    return False


def children() -> list[int]:
    """Return the children of this process, also those that it got from ended processes."""
    found: list[int] = []
    for task in (_PROC / "self" / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def kill_session(leader: int) -> None:
    """Kill the session of a rank that has ended and is not reaped yet, except cleaners."""
    cleaners = [pid for pid in children() if _is_in(leader, pid) and cleans(pid)]
    if not cleaners:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        return
    members = [pid for pid in _all_processes() if pid not in cleaners and _is_in(leader, pid)]
    kill(members)


def kill(pids: Iterable[int]) -> None:
    """Kill these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_helpers(marks: frozenset[bytes]) -> list[int]:
    """Kill and reap the helpers of a rank that has ended. Return those that do not end in time.

    If a helper ends, its own children become children of this process, and end as well. Then
    nothing uses the temporary folder of the rank's multiprocessing, and it is removed.
    """
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in children() if has_marks(pid, marks) and not cleans(pid)]:
        if time.monotonic() > deadline:
            return left
        kill(left)
        time.sleep(_TICK_S)
        for pid in left:
            _is_reaped(pid)
    environment = dict(mark.decode().split("=", 1) for mark in marks)
    shutil.rmtree(
        Path(tempfile.gettempdir(), names.temporary_folder(environment)), ignore_errors=True
    )
    return []


def end_descendants() -> None:
    """Kill all descendants of this process. Those of its children become its own children.

    Cleaners get some time to end themselves.
    """
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in children() if not _is_reaped(pid)]:
        late = time.monotonic() > deadline
        kill(pid for pid in left if late or not cleans(pid))
        if late:
            return
        time.sleep(_TICK_S)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _is_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


def cleans(pid: int) -> bool:
    """Return whether a process removes shared resources after the end of their users."""
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes()
        return any(name in command for name in _CLEANERS)
    return False


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
