"""The hosts of this machine: their log, and the simulated hosts that are the nodes of jobs here.

The log is a file that all jobs of a user share, and that outlives all of them. A simulated host is
a name that one agent at a time may have, in the jobs of all flows and shells. The agent holds a
lock on the host's file for as long as it lives, so the kernel frees the host of one that died. A
file beside the host's own has its faults (`rekindle.agent.devices.simulated_host`).
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.errors import JobError, UsageError
from rekindle.job.file_lock import locked
from rekindle.recovery.journal.host_history import AnyHostEvent, Host, fold, in_order, read


class HostLog:
    """One file, a JSON line for each event; any number of processes append to it."""

    def __init__(self, home: Path) -> None:
        self._path = home / names.HOSTS_FILE

    def append(self, event: AnyHostEvent) -> None:
        """Add an event, unless one of the same source is there; it is on disk when this returns.

        Raises JobError: the file is damaged, or cannot be written.
        """
        try:
            self._append(event)
        except OSError as error:
            raise JobError(f"{self._path} cannot be written: {error}") from error

    def _append(self, event: AnyHostEvent) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path) as handle:
            if any(each.is_same_source(event) for each in self.events()):
                return
            end = os.lseek(handle, 0, os.SEEK_END)
            if end and os.pread(handle, 1, end - 1) != b"\n":
                # A writer was killed in the middle of a line: what it wanted to say is lost.
                end = os.pread(handle, end, 0).rfind(b"\n") + 1
                os.ftruncate(handle, end)
            os.pwrite(handle, msgspec.json.encode(event) + b"\n", end)
            os.fsync(handle)

    def hosts(self) -> dict[str, Host]:
        """Return all hosts that anything is known of.

        Raises JobError: the file is damaged, or cannot be read.
        """
        return fold(self.events())

    def events(self) -> list[AnyHostEvent]:
        """Return all that was noted, in its order. Raises as hosts() does."""
        try:
            return read(self._path.read_bytes().splitlines())
        except FileNotFoundError:
            return []
        except (OSError, JobError) as error:
            raise JobError(f"{self._path} cannot be read: {error}; mend or remove it") from error


MOST_HOSTS = 1024  # tried before giving up; more agents than that do not run on one machine


class SimulatedHosts:
    """The simulated hosts of this machine, `local-0`, `local-1` and so on.

    limit: how many there are; 0: as many as are asked for.
    """

    def __init__(self, home: Path, limit: int = 0) -> None:
        self._folder = home / names.HOSTS_DIRECTORY
        self._limit = limit or MOST_HOSTS

    def take(self, known: dict[str, Host]) -> tuple[Path, int]:
        """Take a free host that is not isolated; return its file, open and locked.

        It is to be inherited by the agent. Raises JobError: there is none.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        every = map(host_name, range(self._limit))
        for name in in_order(every, known, time.time()):
            handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return self._folder / name, handle
        isolated = ", ".join(name for name, host in known.items() if host.isolated) or "none"
        raise JobError(f"no host is free of {self._limit}; isolated: {isolated}")

    def require(self, count: int, known: dict[str, Host]) -> None:
        """Raises UsageError: fewer hosts than that are not isolated."""
        usable = in_order(map(host_name, range(self._limit)), known, time.time())
        if len(usable) < count:
            raise UsageError(
                f"the job wants {count} hosts, and only {len(usable)} of {self._limit} are not "
                "isolated; see rekindle nodes, and rekindle release-node"
            )


def host_name(number: int) -> str:
    """Name a simulated host."""
    return f"local-{number}"
