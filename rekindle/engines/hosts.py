"""Manage the hosts of this machine: their log, and the simulated hosts of jobs.

The log is a file that all jobs of a user share, and that outlives all of them. A simulated host is
a name that one agent at a time may have, across the jobs of all flows and shells. The agent holds a
lock on the host's file while it runs, so the kernel frees the host of an agent that ended. A file
next to the host's file has its faults (`rekindle.agent.devices.tools`).
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.errors import JobError, UsageError
from rekindle.file_lock import locked
from rekindle.job.spec import JobSpec, KeepsOff, home
from rekindle.recovery.journal.host_history import AnyHostEvent, Host, fold, in_order, read

MOST_HOSTS = 1024  # limit of the search; one machine does not run more agents


class HostLog:
    """One file with a JSON line for each event; any number of processes append to it."""

    def __init__(self, home: Path) -> None:
        self._path = home / names.HOSTS_FILE

    def append(self, event: AnyHostEvent) -> None:
        """Add an event to the disk, unless the log has one of the same source.

        Raises JobError: the file is damaged, or this process cannot write it.
        """
        try:
            self._append(event)
        except OSError as error:
            raise JobError(f"Rekindle cannot write {self._path}: {error}") from error

    def _append(self, event: AnyHostEvent) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path) as handle:
            if any(each.is_same_source(event) for each in self.events()):
                return
            end = os.lseek(handle, 0, os.SEEK_END)
            if end and os.pread(handle, 1, end - 1) != b"\n":
                # A signal killed a writer in the middle of a line. Its event is lost.
                end = os.pread(handle, end, 0).rfind(b"\n") + 1
                os.ftruncate(handle, end)
            os.pwrite(handle, msgspec.json.encode(event) + b"\n", end)
            os.fsync(handle)

    def hosts(self) -> dict[str, Host]:
        """Return all hosts that the log names.

        Raises JobError: the file is damaged, or this process cannot read it.
        """
        return fold(self.events())

    def events(self) -> list[AnyHostEvent]:
        """Return all events in their order. Raises JobError as hosts() does."""
        try:
            return read(self._path.read_bytes().splitlines())
        except FileNotFoundError:
            return []
        except (OSError, JobError) as error:
            raise JobError(
                f"Rekindle cannot read {self._path}: {error}; correct or remove the file"
            ) from error


class SimulatedHosts:
    """The simulated hosts of this machine, `local-0`, `local-1` and so on.

    limit: their number; 0: as many as a job needs, at most MOST_HOSTS.
    """

    def __init__(self, home: Path, limit: int = 0) -> None:
        self._folder = home / names.HOSTS_DIRECTORY
        self._limit = limit or MOST_HOSTS

    def take(self, known: dict[str, Host]) -> tuple[Path, int]:
        """Take a free host that is not isolated; return its file, open and locked.

        The agent inherits the open file. Raises JobError: no host is free.
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
        raise JobError(f"none of {self._limit} hosts is free; isolated: {isolated}")

    def require(self, count: int, known: dict[str, Host]) -> None:
        """Check that enough hosts are usable.

        Raises UsageError: fewer than `count` are not isolated.
        """
        usable = in_order(map(host_name, range(self._limit)), known, time.time())
        if len(usable) < count:
            raise UsageError(
                f"the job needs {count} hosts, but only {len(usable)} of {self._limit} are not "
                "isolated; see rekindle nodes, and rekindle release-node"
            )


def simulated_hosts(spec: JobSpec) -> SimulatedHosts | None:
    """Return the simulated hosts of a job on this machine; None: it runs on the machine itself."""
    return None if spec.keeps_off is KeepsOff.ONE_HOST else SimulatedHosts(home())


def host_name(number: int) -> str:
    """Return the name of a simulated host."""
    return f"local-{number}"
