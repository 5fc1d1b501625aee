"""The log of hosts as a file that all jobs of a user share, and that outlives all of them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.errors import JobError
from rekindle.job.file_lock import locked
from rekindle.recovery.journal.host_history import AnyHostEvent, Host, fold, read


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
