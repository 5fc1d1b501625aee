"""Reads a job's journal from its file, and keeps the copy of one that another machine writes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rekindle.job.file_lock import locked
from rekindle.recovery.journal import journal

_LONGEST_END = 1 << 20  # bytes, of the event that tells of a job's end


def events_in(path: Path) -> list[journal.AnyEvent]:
    """Read the journal that is in a file; without a file there are no events.

    Raises JobError: it is no journal.
    """
    try:
        return journal.read(path.read_bytes().splitlines())
    except FileNotFoundError:
        return []


def is_over(path: Path) -> bool:
    """Whether the newest attempt has ended, as far as this machine's journal (if any) tells."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_END))
            *_, last = file.read().splitlines() or [b""]
        return isinstance(journal.decode(last), journal.Ended)
    except (FileNotFoundError, msgspec.DecodeError):  # none, one being written, or a longer event
        return False


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
