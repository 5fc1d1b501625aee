"""The journal of a job in its directory, and how it is kept where it is written elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rekindle.job.file_lock import locked
from rekindle.job.journal_reader import events_in
from rekindle.recovery.journal import journal


class JournalCopy:
    """The events that are known on this machine; any number of processes add to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1  # of the file when we last wrote it, and the number of its last event
        self._last = 0

    def events(self) -> list[journal.AnyEvent]:
        """Read what is there. Raises JobError: it is no journal."""
        return events_in(self._path)

    def add(self, events: Iterable[journal.AnyEvent]) -> None:
        """Add those that come next; what is known is left out, and what would leave a gap, too."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path) as handle:
            if os.fstat(handle).st_size != self._size:  # somebody else has written
                self._look(handle)
            for event in events:
                if event.seq == self._last + 1:
                    line = journal.encode(event) + b"\n"
                    os.pwrite(handle, line, self._size)
                    self._size, self._last = self._size + len(line), event.seq

    def _look(self, handle: int) -> None:
        """Find the end, and cut off the line in which a writer was killed."""
        known = self.events()
        self._last = known[-1].seq if known else 0
        lines = self._path.read_bytes().splitlines(keepends=True)[: len(known)]
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
            self._last = known[-2].seq if len(known) > 1 else 0
        self._size = sum(map(len, lines))
        os.ftruncate(handle, self._size)
