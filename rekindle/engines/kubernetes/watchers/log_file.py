"""The output of one pod as a file on this machine, a time before each line.

The file itself says how far it goes: whoever goes on with it needs to know nothing else.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from datetime import datetime
from pathlib import Path

PIECE = 1 << 16  # bytes: of a longer line one piece after the other is written
_TAIL = 1 << 22  # of the file's end, in which what has come twice is looked for
# Nodes write their own zone; the server cuts off what is less than a second.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ")


class LogFile:
    """Appends lines, each once, however often they come; everything raises OSError.

    BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise
        self._known = Counter[int]()
        self._in_line = self._skips = False
        self._cut: int | None = None  # where it ends, once something is added

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._handle).st_size

    def close(self) -> None:
        """Let others have it."""
        os.close(self._handle)

    def resume(self, at: int | None = None) -> str:
        """Cut off a line that broke off; return the time from which lines are wanted again.

        They come again from the beginning of the last second on. "": all are wanted.
        at: go on from there, where a line begins; what is behind is cut off when one is added.
        """
        self._known.clear()
        self._in_line = False
        self._cut = at
        end = self.size if at is None else at
        begin = max(0, end - _TAIL)
        tail = os.pread(self._handle, end - begin, begin)
        whole = tail.rfind(b"\n") + 1
        if at is None:
            os.ftruncate(self._handle, begin + whole)
        lines = tail[:whole].splitlines(keepends=True)
        times = [_TIME.match(line) for line in lines]
        last = next((time for time in reversed(times) if time), None)
        if last is None:
            return ""
        for line, time in zip(lines, times, strict=True):
            if time and time[1] >= last[1]:
                self._known[_name(line)] += 1
        return (last[1] + last[2]).decode()

    def add(self, piece: bytes) -> None:
        """Take a line, or the next piece of one; the last has its end."""
        if self._cut is not None:
            os.ftruncate(self._handle, self._cut)
            self._cut = None
        if not self._in_line:
            name = _name(piece)
            self._skips = self._known[name] > 0
            self._known[name] -= self._skips
        self._in_line = not piece.endswith(b"\n")
        if not self._skips:
            _write(self._handle, piece)

    def end_line(self) -> None:
        """Take what came last for a whole line: nothing comes after it."""
        if self._in_line:
            self.add(b"\n")


def second_of(line: bytes) -> datetime | None:
    """When it was put out; None: it does not say."""
    time = _TIME.match(line)
    return time and datetime.fromisoformat((time[1] + time[2].replace(b"Z", b"+00:00")).decode())


def _name(line: bytes) -> int:
    """Tell lines apart that begin alike; their times do that already, mostly."""
    return hash(line[:PIECE].rstrip(b"\n"))


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
