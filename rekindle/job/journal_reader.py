"""Reads a job's journal from its file, which the coordinator may be writing."""

from __future__ import annotations

from pathlib import Path

import msgspec

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
