"""Find the coordinators of a job among the processes of this machine, and end them.

A coordinator that is stopped, or hangs, keeps the job's port and the lock on its journal. So the
process that replaces it ends it first. A killed launcher may have written no process id, so this
module finds coordinators by their command line.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle import names
from rekindle.errors import JobError

COORDINATOR = "rekindle.coordinator.process"  # the module that a coordinator runs
_DIRECTORY = "--directory"
_PROC = Path("/proc")


def command(directory: Path) -> list[str]:
    """Return the arguments of Python that start a coordinator of the job in this directory."""
    return ["-m", COORDINATOR, _DIRECTORY, str(directory)]


def end_coordinators(directory: Path) -> list[int]:
    """Kill the coordinators of the job in this directory; return their process ids.

    Raises JobError: one of them does not end. The text names its process id.
    """
    return [pid for pid in coordinators(directory) if _end(pid, directory)]


def coordinators(directory: Path) -> Iterator[int]:
    """Yield the process ids of the coordinators of the job in this directory."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _is_coordinator(int(entry.name), directory):
            yield int(entry.name)


def _is_coordinator(pid: int, directory: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        found = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return _contains([os.fsdecode(each) for each in found], command(directory))
    return False


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words)))


def _end(pid: int, directory: Path) -> bool:
    """Kill a coordinator, and wait until it is dead. False: it has ended by itself."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The handle belongs to one process. The check after it excludes a later process of this id.
        if not _is_coordinator(pid, directory):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = select.poll()
        end.register(handle, select.POLLIN)
        if not end.poll(1000 * names.KILLED_S):
            raise JobError(
                f"the job's coordinator (process {pid}) does not answer, and SIGKILL does not end "
                f"it within {names.KILLED_S:g} s; the kernel blocks it, for example in a file "
                "system that hangs"
            )
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise JobError(
            f"the job's coordinator (process {pid}) does not answer, and this user may not end it"
        ) from error
    finally:
        os.close(handle)
    return True
