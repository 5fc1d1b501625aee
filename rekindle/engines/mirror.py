"""The journal of a job in its directory, and how it is kept where it is written elsewhere."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from rekindle.recovery import journal


class Mirror:
    """The events that are known on this machine; any number of processes add to them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def events(self) -> list[journal.AnyEvent]:
        """Read what is there. Raises JobError: it is no journal."""
        try:
            return journal.read(self._path.read_bytes().splitlines())
        except FileNotFoundError:
            return []

    def extend(self, fetched: list[journal.AnyEvent]) -> list[journal.AnyEvent]:
        """Add what is new, and return all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            known = self.events()
            last = known[-1].seq if known else 0
            news = [event for event in fetched if event.seq > last]
            # Rewritten from the end of what is whole: a writer may have been killed in a line.
            whole = len(journal.encode_all(known))
            os.ftruncate(handle, whole)
            os.pwrite(handle, journal.encode_all(news), whole)
            return known + news
        finally:
            os.close(handle)
