"""Define the base class of the journal's events, and read files of events. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from rekindle.errors import JobError

T = TypeVar("T")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Describe one event; `seq` increases by one, `at` is seconds since the epoch."""

    seq: int = 0
    at: float = 0.0


def read_lines(lines: Iterable[bytes], decode_line: Callable[[bytes], T], what: str) -> list[T]:
    """Decode the lines of a file, without a last line that a killed writer left incomplete.

    `what` names the file in the error. Raises JobError: another line cannot be decoded.
    """
    kept = [line for line in lines if line.strip()]
    found = []
    for number, line in enumerate(kept, 1):
        try:
            found.append(decode_line(line))
        except msgspec.DecodeError as error:
            if number != len(kept):
                raise JobError(f"line {number} of {what}: {error}") from error
    return found
