"""The journal on disk, and its followers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from rekindle.recovery import journal

_KEEPALIVE = b'{"type":"keepalive"}'


class Ledger:
    """Appends events to a file of JSON lines and hands them to whoever follows.

    A torn last line (the writer was killed) is cut off, so that what follows stays readable.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(path, sum(map(len, lines[:-1])))
            lines.pop()
        self.events: list[journal.Event] = [journal.decode(line) for line in lines]
        self._file = path.open("ab")
        self._followers: set[asyncio.Queue[journal.Event]] = set()

    def append(self, event: journal.Event) -> None:
        """Number, time and write one event."""
        event = msgspec.structs.replace(event, seq=len(self.events) + 1, at=time.time())
        self.events.append(event)
        self._file.write(journal.encode(event) + b"\n")
        self._file.flush()
        self.publish(event)

    def publish(self, event: journal.Event) -> None:
        """Hand an event to the followers without keeping it."""
        for follower in self._followers:
            follower.put_nowait(event)

    def close(self) -> None:
        """Make the file last."""
        os.fsync(self._file.fileno())
        self._file.close()

    async def follow(self, since: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yield every event after `since` as a JSON line, up to the job's end.

        Between events a keepalive comes every `keepalive_s` seconds.
        """
        queue: asyncio.Queue[journal.Event] = asyncio.Queue()
        for event in self.events[since:]:
            queue.put_nowait(event)
        self._followers.add(queue)
        attempt_ended = False
        try:
            while not attempt_ended:
                try:
                    event = await asyncio.wait_for(queue.get(), keepalive_s)
                except asyncio.TimeoutError:
                    yield _KEEPALIVE
                    continue
                yield journal.encode(event)
                # An earlier attempt's end is history; only that of the last one ends the stream.
                attempt_ended = isinstance(event, journal.Ended) and event is self.events[-1]
        finally:
            self._followers.discard(queue)
