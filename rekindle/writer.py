"""Threads that write for an agent or coordinator, whose event loop must wait for no file system."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator

from rekindle.console import catch, line, say, write_lines, write_some, write_with

HANGS_S = 10.0  # a stream or file that accepts nothing for so long hangs
END_S = 2.0  # The process waits no longer for a writer without progress.
_MOST_SHOWN = 64 << 20  # bytes of ranks that wait for a stream of the process
_MOST_SAID = 1 << 20  # bytes of the process itself that wait in addition
_LOOK_S = 0.1  # between two looks at a worker
_LOCK_S = 0.5  # a caller without the lock continues after this time; the counts may then be wrong


class Worker:
    """One thread that does its work in order. done: the number of finished pieces of work."""

    def __init__(self, name: str) -> None:
        self.done = 0
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        """Add work to the thread's queue."""
        self._waiting.put(work)

    def flush(self, limit_s: float) -> None:
        """Wait for the end of all work so far, until there is no progress for limit_s seconds."""
        reached = threading.Event()
        self.do(reached.set)
        looks, done = 0, -1
        while looks * _LOOK_S < limit_s and not reached.wait(_LOOK_S):
            looks, done = (looks + 1, done) if done == self.done else (0, self.done)

    def close(self, limit_s: float) -> None:
        """Flush, and end the thread after its last work."""
        self.flush(limit_s)
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception:  # an error must not lose the next work
                say(traceback.format_exc().rstrip(), logging.ERROR)
            self.done += 1


class Target:
    """A descriptor to which a worker's thread writes. It reports a loss of data once.

    write: writes some of the data, and returns its length.
    """

    def __init__(
        self,
        fd: int,
        lost: Callable[[str], None] = lambda why: None,
        write: Callable[[int, memoryview], int] = write_some,
    ) -> None:
        self.fd = fd
        self._write_some = write
        self._lost = lost
        self._reported = False
        self._put = self._written = 0  # bytes; the caller counts the first, the thread the second
        self.progress = time.monotonic()

    @property
    def waiting(self) -> int:
        """The bytes that wait to be written."""
        return self._put - self._written

    @property
    def hangs(self) -> bool:
        """Whether bytes wait, and the thread has written none for HANGS_S."""
        return self.waiting > 0 and time.monotonic() - self.progress > HANGS_S

    def put(self, worker: Worker, data: bytes) -> None:
        """Queue the data for the thread."""
        if self.waiting == 0:
            self.progress = time.monotonic()
        self._put += len(data)
        worker.do(functools.partial(self._write, data))

    def lose(self, why: str) -> None:
        """Report lost data; any thread may call this."""
        if not self._reported:
            self._reported = True
            self._lost(why)

    def close(self) -> None:
        """Close the descriptor, in the thread. A file system may report a failed write here."""
        try:
            os.close(self.fd)
        except OSError as error:
            self.lose(str(error.strerror))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._write_some(self.fd, left) :]
                self.progress = time.monotonic()
        except OSError as error:
            self.lose(str(error.strerror))
        self._written += len(data)


class Console:
    """Standard output (1) and standard error (2) of this process. One thread writes both, in order.

    They may lead to a held terminal, or to a file on a file system that hangs. The console never
    waits for them. If too much waits, it drops whole lines, and later writes their number. Any
    thread may call the methods. A destructor that prints may interrupt a thread that holds other
    locks, so the wait for the console's own lock has a limit.
    """

    def __init__(self) -> None:
        self._worker = Worker("rekindle-console")
        self._targets = {fd: Target(fd, write=write_lines) for fd in (1, 2)}
        self._dropped: Counter[int] = Counter()  # lines, by stream
        self._lock = threading.RLock()  # a destructor that prints may interrupt a caller

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        locked = self._lock.acquire(timeout=_LOCK_S)
        try:
            yield
        finally:
            if locked:
                self._lock.release()

    def show(self, fd: int, lines: bytes) -> None:
        """Write lines of a rank, which also has a file; drop them while the stream hangs."""
        with self._counting():
            self._put(fd, lines, 0 if self._targets[fd].hangs else _MOST_SHOWN)

    def say(self, fd: int, lines: bytes) -> None:
        """Write lines of this process, which exist nowhere else, as long as there is room."""
        with self._counting():
            self._put(fd, lines, _MOST_SHOWN + _MOST_SAID)

    def flush(self, limit_s: float) -> None:
        """Wait until all lines are written, or for limit_s seconds without progress.

        Then write the numbers of dropped lines that no later line has shown.
        """
        self._worker.flush(limit_s)
        with self._counting():
            late = [fd for fd, target in self._targets.items() if not target.waiting]
            late = [fd for fd in late if self._dropped[fd]]
            for fd in late:
                self._put(fd, b"", 1)
        if late:
            self._worker.flush(limit_s)

    def _put(self, fd: int, lines: bytes, room: int) -> None:
        target = self._targets[fd]
        if target.waiting >= room:
            self._dropped[fd] += lines.count(b"\n")
            return
        if dropped := self._dropped.pop(fd, 0):
            text = f"the stream accepted no data; lines missing here: {dropped}"
            lines = line(text) + lines
        target.put(self._worker, lines)


class _Text(io.TextIOBase):
    """A stream for `print`. It says complete lines, and at `flush` also the thread's rest.

    Each thread has its own rest. A destructor that prints may interrupt each method, so the rest is
    taken before it is used.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._local = threading.local()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        lines, end, rest = (self._take() + text).rpartition("\n")
        self._local.rest = rest + self._take()
        if end:
            self._say(lines)
        return len(text)

    def flush(self) -> None:
        """Say the rest. This does not wait until it is written."""
        if rest := self._take():
            self._say(rest)

    def _take(self) -> str:
        rest, self._local.rest = getattr(self._local, "rest", ""), ""
        return rest

    def _say(self, text: str) -> None:
        say(text, logging.INFO if self._fd == 1 else logging.WARNING, self._fd)


@functools.cache
def console() -> Console:
    """Return the console of this process."""
    return Console()


def take_streams() -> None:
    """Let the console write each line of this process, and let the process end after it.

    Python and libraries also print: tracebacks, warnings, errors of callbacks.
    """
    write_with(console().say)
    catch()
    sys.stdout, sys.stderr = _Text(1), _Text(2)
    atexit.register(flush)


def flush() -> None:
    """Write all prints, until there is no progress for END_S. The end of a process calls this."""
    sys.stdout.flush()
    sys.stderr.flush()
    console().flush(END_S)
