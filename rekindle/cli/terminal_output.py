"""Print tables and progress bars on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rekindle.checkpoints.verifying import OnBytes
from rekindle.words import columns, size

_LINE_S = 5.0  # between two lines without a terminal


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under a head, each column as wide as its widest cell."""
    print(columns([head, *(tuple(map(str, row)) for row in rows)]))


def clock(at: float) -> str:
    """Return the local time of seconds since the epoch; "?" if the value is out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[OnBytes]:
    """Show how many of `total` bytes are done, on standard error."""
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        lines = _Lines(what, total)
        yield lines.on_bytes
        lines.show()


def _bar() -> Any:
    from rich import progress as rich  # a slow import, and most commands do not need it
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(bar_width=20),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    return rich.Progress(*columns, console=Console(stderr=True))


class _Lines:
    """Prints progress as lines of text, at most one in _LINE_S seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._began = self._shown = time.monotonic()

    def on_bytes(self, count: int) -> None:
        """Count `count` more bytes as done."""
        self._done += count
        if time.monotonic() - self._shown >= _LINE_S:
            self.show()

    def show(self) -> None:
        """Print a line."""
        self._shown = time.monotonic()
        rate = self._done / max(self._shown - self._began, 1e-3)
        text = f"{self._what}: {size(self._done)} of {size(self._total)}, {size(rate)}/s"
        print(text, file=sys.stderr, flush=True)
