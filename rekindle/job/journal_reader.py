"""Reads a job's journal from its file, and keeps copies of journals of other machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rekindle.file_lock import locked
from rekindle.recovery.journal import journal

_LONGEST_END = 1 << 20  # bytes; the event that records the end of a job is not longer


def events_in(path: Path) -> list[journal.AnyEvent]:
    """Read the journal in a file; without a file there are no events.

    Raises JobError: the file is not a journal.
    """
    try:
        return journal.read(path.read_bytes().splitlines())
    except FileNotFoundError:
        return []


def complete_lines(path: Path) -> list[bytes]:
    """Read the lines of a file, without a last line that a killed writer left incomplete."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def first_event(path: Path) -> journal.AnyEvent | None:
    """Return the first event of a journal file; None: there is none yet."""
    try:
        with path.open("rb") as file:
            return journal.decode(file.readline())
    except (FileNotFoundError, msgspec.DecodeError):  # no file, or a partial line
        return None


def last_event(path: Path) -> journal.AnyEvent | None:
    """Return the last event of a journal file; None: it is partial or long, or there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_END))
            *_, last = file.read().splitlines() or [b""]
        return journal.decode(last)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def is_over(path: Path) -> bool:
    """Return whether the newest attempt has ended, according to the journal file, if it exists."""
    return isinstance(last_event(path), journal.Ended)


class JournalCopy:
    """The known events on this machine; any number of processes add to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1  # the file's size after our last write; `_last`: its last event
        self._last = 0

    def events(self) -> list[journal.AnyEvent]:
        """Read the events in the copy. Raises JobError: the file is not a journal."""
        return events_in(self._path)

    def add(self, events: Iterable[journal.AnyEvent]) -> None:
        """Add the next events. Omit known events, and events after a gap."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path) as handle:
            if os.fstat(handle).st_size != self._size:  # another process has written
                self._look(handle)
            for event in events:
                if event.seq == self._last + 1:
                    line = journal.encode(event) + b"\n"
                    os.pwrite(handle, line, self._size)
                    self._size, self._last = self._size + len(line), event.seq

    def _look(self, handle: int) -> None:
        """Find the end of the file, and cut off a line that a killed writer left incomplete."""
        lines = complete_lines(self._path)
        known = journal.read(lines)
        self._last = known[-1].seq if known else 0
        self._size = sum(map(len, lines[: len(known)]))
        os.ftruncate(handle, self._size)
