"""Running a user's command as a step of a flow: its output is logged, and it ends with the flow."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rekindle.errors import JobError, UsageError

_MARK = "REKINDLE_COMMAND_LOCK"  # in the environment of a command, and of all that it starts
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    lock: Path,
    log: Callable[..., None],
) -> str:
    """Run a command; return the last line that it printed.

    Its standard output and error are logged line by line. lock: a file; one command at a time runs
    under it, and what a command whose flow was killed has left running is ended first, for both
    would work on the same. Raises UsageError: it cannot be started. Raises JobError: it ended with
    another status than 0.
    """
    last = ""
    with _held(lock, log) as handle:
        _end_leftovers(lock)
        marked = {**os.environ, **environment, _MARK: str(lock)}
        process = _start(command, folder, marked, handle)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = line.rstrip() or last
                log("%s", line.rstrip())
            status = process.wait()
        except BaseException:  # Prefect raises one where the flow's process is asked to end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            process.stdout.close()
    if status:
        raise JobError(f"{' '.join(command)} ended with status {status}: {last}")
    return last


def _start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], handle: int
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(handle,),
            preexec_fn=_end_with_parent,  # noqa: PLW1509  one call of the kernel, no lock
        )
    except OSError as error:
        raise UsageError(f"command {command[0]!r} cannot be started: {error}") from error


@contextlib.contextmanager
def _held(lock: Path, log: Callable[..., None]) -> Iterator[int]:
    """Hold the lock; the kernel frees it when flow and command are gone."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("Another process of this flow run does this already (%s); waiting", lock)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _end_leftovers(lock: Path) -> None:
    """End what a command under this lock has started; the kernel has ended that one itself."""
    mark = f"{_MARK}={lock}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _end_with_parent() -> None:
    """End the command with the flow's process, however that ends: its rerun starts it again."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
