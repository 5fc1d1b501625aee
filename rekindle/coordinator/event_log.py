"""The events of the job: their numbers, their record in the journal, and their followers.

A thread writes the journal, so that the coordinator's event loop waits for no file system. An event
counts as recorded when the thread has written it. Followers receive only recorded events, and the
coordinator sends the orders that follow an event only after the event is recorded. So a coordinator
that takes over finds in the journal every event whose consequences an agent can know.

The job does not stop for its journal. If the file system refuses an event, or does not answer for
HANGS_S, the event counts as recorded in memory, and a text says so. A takeover loses such events.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from rekindle.job.journal_file import JournalFile
from rekindle.recovery.journal import journal
from rekindle.supervised import within

HANGS_S = 10.0  # a write that takes so long hangs
_KEEPALIVE = b'{"type":"keepalive"}'


class EventLog:
    """All events of the job, and the thread that writes them.

    on_recorded: the event loop calls it after the thread has recorded events. events: all events,
    recorded or not. recorded: the number of recorded events.
    """

    def __init__(self, file: JournalFile, on_recorded: Callable[[], None]) -> None:
        self.events: list[journal.Event] = list(file.known)
        self.recorded = self._earlier = self._written = len(self.events)
        self._file = file
        self._on_recorded = on_recorded
        # None ends a follower.
        self._followers: set[asyncio.Queue[journal.Event | None]] = set()
        self._loop = asyncio.get_running_loop()
        self._hangs = False
        self._watch: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # a new one each time that events are recorded
        self._ended = asyncio.Event()
        self._queue: queue.SimpleQueue[journal.Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._write_all, name="rekindle-journal", daemon=True).start()

    def append(self, event: journal.Event) -> None:
        """Give an event its number and time, and let the thread write it."""
        event = msgspec.structs.replace(event, seq=len(self.events) + 1, at=time.time())
        self.events.append(event)
        self._queue.put(event)
        if self._hangs:
            self._record(len(self.events))
        elif self._watch is None:
            self._watch = self._loop.call_later(HANGS_S, self._note_hang)

    def publish(self, event: journal.Event) -> None:
        """Pass an event to the followers without keeping it."""
        for follower in self._followers:
            follower.put_nowait(event)

    async def settle(self) -> None:
        """Wait until all present events are recorded."""
        number = len(self.events)
        while self.recorded < number:
            await self._changed.wait()

    async def close(self) -> None:
        """Wait until all events are written, at most HANGS_S; close the file, and end followers."""
        self._queue.put(None)
        try:
            await asyncio.wait_for(self._ended.wait(), HANGS_S)
        except asyncio.TimeoutError:
            lost = len(self.events) - self._written
            self._file.report(
                f"the file system does not answer; the coordinator ends, and loses events: {lost}"
            )
        for follower in self._followers:
            follower.put_nowait(None)

    async def follow(self, since: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yield every event after `since` as a JSON line, until the attempt ends or the log closes.

        Between events it yields a keepalive every `keepalive_s` seconds.
        """
        queue: asyncio.Queue[journal.Event | None] = asyncio.Queue()
        for earlier in self.events[since : self.recorded]:
            queue.put_nowait(earlier)
        self._followers.add(queue)
        ended = False
        try:
            while not ended:
                try:
                    # A big world starts with thousands of events: a timer only for an empty queue.
                    event = (
                        await within(queue.get(), keepalive_s)
                        if queue.empty()
                        else queue.get_nowait()
                    )
                except asyncio.TimeoutError:
                    yield _KEEPALIVE
                    continue
                if event is None:
                    return
                yield journal.encode(event)
                # An end of an earlier attempt does not end the stream.
                ended = isinstance(event, journal.Ended) and event.seq > self._earlier
        finally:
            self._followers.discard(queue)

    # ---- the thread

    def _write_all(self) -> None:
        open_ = True
        while open_:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            open_ = batch[-1] is not None  # nothing follows None
            self._file.write(event for event in batch if event is not None)
            if not open_:
                self._file.close()
            self._tell(self._note_written, len(batch) if open_ else len(batch) - 1)
        self._tell(self._ended.set)

    def _tell(self, call: Callable[..., None], *arguments: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it did not wait for a hang
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- in the event loop

    def _note_written(self, count: int) -> None:
        self._written += count
        pending = self._written < len(self.events)
        if self._watch is not None:
            self._watch.cancel()
        self._watch = None
        if self._hangs and pending:
            return  # the events count as recorded already
        if self._hangs:
            self._file.report("the file system answers again")
        self._hangs = False
        if pending:
            self._watch = self._loop.call_later(HANGS_S, self._note_hang)
        self._record(self._written)

    def _note_hang(self) -> None:
        self._watch = None
        self._hangs = True
        self._file.report(
            f"the file system has not answered for {HANGS_S:g} s; the coordinator keeps events in "
            "memory until it can write again"
        )
        self._record(len(self.events))

    def _record(self, number: int) -> None:
        new, self.recorded = self.events[self.recorded : number], max(self.recorded, number)
        for event in new:
            self.publish(event)
        if new:
            self._changed.set()
            self._changed = asyncio.Event()
            self._on_recorded()
