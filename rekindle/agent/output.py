"""Writes the output of ranks to files and, with a prefix, to the agent's own streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rekindle import names
from rekindle.agent.threads import started
from rekindle.errors import RekindleError, UsageError
from rekindle.job.spec import JobSpec
from rekindle.recovery.faults.fault import ErrorRecord

LOGS_S = 60.0  # A log directory that does not answer for so long is unusable.
ERROR_S = 5.0  # The agent reports the end of a rank after this time, even without its error.
HANGS_S = 10.0  # A longer write no longer delays the rank.
END_S = 2.0  # The agent waits no longer for a writer without progress.
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes; the console shows longer lines in pieces, the file in full
_MOST_WAITING = 4 << 20  # bytes of a stream; a rank that prints faster waits, as at any slow pipe
_MOST_SHOWN = 64 << 20  # bytes that wait for the console
_AGAIN_S = 0.05
_LOOK_S = 0.1  # between two looks at a closing worker


class Logs(NamedTuple):
    """The open log files of one process of a rank. directory: it also has the rank's error file."""

    directory: Path
    stdout: int
    stderr: int

    def close(self) -> None:
        """Close both logs."""
        os.close(self.stdout)
        os.close(self.stderr)


def open_logs(directory: Path, metrics_file: Path) -> Logs:
    """Make the directories of a rank's files, remove its old error file, and open its logs.

    Raises UsageError: the agent cannot write to the log directory. Raises OSError: it cannot make
    the directory of the metrics.
    """
    metrics_file.parent.mkdir(parents=True, exist_ok=True)
    opened: list[int] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / names.ERROR_FILE).unlink(missing_ok=True)
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        for name in ("stdout", "stderr"):
            opened.append(os.open(directory / f"{name}.log", mode, 0o644))
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise UsageError(f"log directory {directory}: {error.strerror}") from error
    return Logs(directory, *opened)


class Worker:
    """One thread that does its work in order. done: the number of finished pieces of work."""

    def __init__(self, name: str) -> None:
        self.done = 0
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Add work to the thread's queue."""
        self._waiting.put(work)

    def close(self, limit_s: float) -> None:
        """Wait for the end of all work, until the thread makes no progress for limit_s seconds."""
        self._waiting.put(None)
        looks, done = 0, -1
        while self._thread.is_alive() and looks * _LOOK_S < limit_s:
            looks, done = (looks + 1, done) if done == self.done else (0, self.done)
            self._thread.join(_LOOK_S)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception:  # an error must not lose the next work
                traceback.print_exc()
            self.done += 1


class Target:
    """A descriptor to which a writer's thread writes. It reports a loss of data once."""

    def __init__(self, fd: int, lost: Callable[[str], None] = lambda why: None) -> None:
        self.fd = fd
        self._lost = lost
        self._loss_reported = False
        self._put = self._written = 0  # bytes; the loop counts the first, the thread the second
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
        if not self._loss_reported:
            self._loss_reported = True
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
                left = left[os.write(self.fd, left) :]
                self.progress = time.monotonic()
        except OSError as error:
            self.lose(str(error.strerror))
        self._written += len(data)


class Stream:
    """One stream of one rank. fd: the end of a pipe to which the rank writes.

    A rank that prints faster than its file can take waits, as at any pipe. A file that takes
    nothing for HANGS_S loses lines, and does not delay the rank.
    """

    def __init__(
        self, log: int, files: Worker, console: tuple[Worker, Target] | None, prefix: bytes
    ) -> None:
        self._log = Target(log, self._report_loss)
        self._files = files
        self._console = console
        self._prefix = prefix
        self._pending = b""
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        asyncio.get_running_loop().add_reader(self._read, self._readable)

    def started(self) -> None:
        """Close the agent's copy of the writing end, now that the rank has its own."""
        os.close(self.fd)

    def drain(self) -> None:
        """Read the last output of a rank that ended; helpers may still hold the pipe open."""
        while self._read >= 0 and self._take():
            pass
        if self._read >= 0:
            self._finish()

    def _readable(self) -> None:
        while self._take():
            if self._log.waiting > _MOST_WAITING and not self._log.hangs:
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._read)
                loop.call_later(_AGAIN_S, self._resume)
                return

    def _resume(self) -> None:
        """Read again after a pause, unless the rank has ended since."""
        if self._read >= 0:
            asyncio.get_running_loop().add_reader(self._read, self._readable)

    def _take(self) -> bool:
        """Read a piece of the pipe; False: it has no data now, or it has ended."""
        try:
            data = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._finish()
            return False
        if self._log.waiting > _MOST_WAITING and self._log.hangs:
            self._log.lose("cannot be written, because the file system does not accept data")
        else:
            self._log.put(self._files, data)
        self._show(data)
        return True

    def _report_loss(self, why: str) -> None:
        text = f"rekindle agent: log of {self._prefix.decode()} {why}; lines of it are lost\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    def _show(self, data: bytes) -> None:
        if self._console is None:
            return
        *lines, rest = (self._pending + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._pending = rest
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        assert self._console is not None
        worker, target = self._console
        # A user may pause the terminal (Ctrl-S, a pager), or it may be slow. The file has
        # everything.
        if not target.hangs and target.waiting < _MOST_SHOWN:
            target.put(worker, data)

    def _finish(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1
        if self._pending and self._console is not None:
            self._write(self._prefix + self._pending + b"\n")
        self._files.do(self._log.close)


class Output:
    """The output of a node's ranks. Files and console have a thread each.

    A held terminal or a hanging file system stops neither the agent nor a rank.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._files = Worker("rekindle-logs")
        self._console = Worker("rekindle-console")
        self._shown = {fd: Target(fd) for fd in (1, 2)}

    async def open(self, rank: int, restart: int, metrics_file: Path) -> Logs:
        """Open the logs of a process of a rank.

        Raises RekindleError, OSError: this fails, or takes longer than LOGS_S.
        """
        directory = Path(self._spec.log_directory, f"attempt_{restart}", str(rank))
        opens = started(functools.partial(open_logs, directory, metrics_file), Logs.close)
        try:
            return await asyncio.wait_for(opens, LOGS_S)
        except asyncio.TimeoutError:
            text = f"log directory {directory}: the file system did not answer within {LOGS_S:g} s"
            raise RekindleError(text) from None

    def streams(self, rank: int, logs: Logs) -> list[Stream]:
        """Make the pipes of a rank: standard output, then standard error."""
        prefix = f"[{self._spec.role}{rank}]:".encode()
        streams = []
        for fd, log in ((1, logs.stdout), (2, logs.stderr)):
            # torchrun's -r sends a stream only to its file, and -t to both. Both is our default.
            hidden = self._spec.redirects & fd and not self._spec.tee & fd
            console = None if hidden else (self._console, self._shown[fd])
            streams.append(Stream(log, self._files, console, prefix))
        return streams

    async def error_of(
        self, rank: int, read: Callable[[], ErrorRecord | None]
    ) -> ErrorRecord | None:
        """Read the error that a rank wrote; None: it wrote none, or the file system hangs."""
        try:
            return await asyncio.wait_for(started(read), ERROR_S)
        except Exception as error:  # the agent must still report the end
            text = f"rekindle agent: the agent cannot read the error file of rank {rank}: {error!r}"
            print(text, file=sys.stderr, flush=True)
            return None

    def close(self) -> None:
        """Write the remaining output, as long as that makes progress."""
        for worker in (self._files, self._console):
            worker.close(END_S)
