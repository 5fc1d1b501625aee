"""Writes the output of ranks to files and, with a prefix, to the agent's own streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rekindle import names
from rekindle.agent.threads import started
from rekindle.console import Process, Source, relayed, say
from rekindle.errors import RekindleError, UsageError
from rekindle.job.spec import JobSpec
from rekindle.recovery.faults.fault import ErrorRecord
from rekindle.writer import END_S, Console, Target, Worker, console

LOGS_S = 60.0  # A log directory that does not answer for so long is unusable.
ERROR_S = 5.0  # The agent reports the end of a rank after this time, even without its error.
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes; the console shows longer lines in pieces, the file in full
_MOST_WAITING = 4 << 20  # bytes of a stream; a rank that prints faster waits, as at any slow pipe
_AGAIN_S = 0.05
_TAIL = 2_048  # bytes of a stream that the agent remembers
_LAST_LINES = 3
_LONGEST_TEXT = 300  # characters of a remembered line


class Logs(NamedTuple):
    """The open log files of one process of a rank. directory: it also has the rank's error file."""

    directory: Path
    stdout: int
    stderr: int

    def close(self) -> None:
        """Close both logs."""
        os.close(self.stdout)
        os.close(self.stderr)


def open_logs(directory: Path) -> Logs:
    """Make the log directory of a rank, remove its old error file, and open its logs.

    Raises UsageError: the agent cannot write to the log directory.
    """
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


class Relay:
    """Shows the lines of one stream of a process on the same stream of the agent."""

    def __init__(self, console: Console, source: Source) -> None:
        self._console, self._source = console, source
        self._pending = b""

    def show(self, data: bytes) -> None:
        """Show all complete lines so far. A line that is very long comes in pieces."""
        *lines, rest = (self._pending + data).split(b"\n")
        shown = [relayed(line, self._source) for line in lines]
        if len(rest) > _LONGEST_LINE:
            shown.append(relayed(rest, self._source, continues=True))
            rest = b""
        self._pending = rest
        if shown:
            self._console.show(self._source.stream, b"".join(shown))

    def finish(self) -> None:
        """Show the rest as a line."""
        if self._pending:
            self.show(b"\n")


class Outlet:
    """A pipe for the output of processes that have no log files. fd: the end to which they write.

    It stays open until the agent ends.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        asyncio.get_running_loop().add_reader(self._read, self._take)

    def close(self) -> None:
        """Show the rest, and close both ends."""
        while self._take():
            pass
        self._relay.finish()
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        os.close(self.fd)

    def _take(self) -> bool:
        """Show a piece of the output; False: there is none now."""
        try:
            data = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        self._relay.show(data)
        return True


class Stream:
    """One stream of one rank. fd: the end of a pipe to which the rank writes.

    A rank that prints faster than its file can take waits, as at any pipe. A file that takes
    nothing for HANGS_S loses lines, and does not delay the rank.
    """

    def __init__(self, log: int, files: Worker, name: str, shown: Relay | None) -> None:
        self._log = Target(log, self._report_loss)
        self._files = files
        self._name = name
        self._shown = shown
        self._tail = b""
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        asyncio.get_running_loop().add_reader(self._read, self._readable)

    def last_lines(self) -> str:
        """Return the last lines of the output, as one line; empty: there was none."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        last = [line[:_LONGEST_TEXT] for line in lines if line][-_LAST_LINES:]
        return " | ".join(last)

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
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        if self._shown is not None:
            self._shown.show(data)
        return True

    def _report_loss(self, why: str) -> None:
        say(f"log of {self._name} {why}; lines of it are lost")

    def _finish(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1
        if self._shown is not None:
            self._shown.finish()
        self._files.do(self._log.close)


def _make(folder: Path) -> None:
    """Make a folder in a thread, because the file system may hang."""
    with contextlib.suppress(OSError):  # each rank that writes there reports it
        folder.mkdir(parents=True, exist_ok=True)


class Output:
    """The output of a node's ranks. Files and console have a thread each.

    A held terminal or a hanging file system stops neither the agent nor a rank.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._files = Worker("rekindle-logs")
        self._console = console()
        self._helpers: list[Outlet] = []
        metrics = Path(spec.directory, names.METRICS_DIRECTORY)
        threading.Thread(target=_make, args=(metrics,), daemon=True).start()

    def for_helpers(self) -> tuple[int, int]:
        """Return standard output and error for the fork server and the checkers of nodes."""
        if not self._helpers:
            sources = [Source(Process.FORK_SERVER, fd) for fd in (1, 2)]
            self._helpers = [Outlet(Relay(self._console, source)) for source in sources]
        stdout, stderr = self._helpers
        return stdout.fd, stderr.fd

    async def open(self, rank: int, restart: int) -> Logs:
        """Open the logs of a process of a rank.

        Raises RekindleError: this fails, or takes longer than LOGS_S.
        """
        directory = Path(self._spec.log_directory, f"attempt_{restart}", str(rank))
        opens = started(functools.partial(open_logs, directory), Logs.close)
        try:
            return await asyncio.wait_for(opens, LOGS_S)
        except asyncio.TimeoutError:
            text = f"log directory {directory}: the file system did not answer within {LOGS_S:g} s"
            raise RekindleError(text) from None

    def streams(self, rank: int, logs: Logs) -> list[Stream]:
        """Make the pipes of a rank: standard output, then standard error."""
        prefix = f"[{self._spec.role}{rank}]:"
        streams = []
        for fd, log in ((1, logs.stdout), (2, logs.stderr)):
            # torchrun's -r sends a stream only to its file, and -t to both. Both is our default.
            hidden = self._spec.redirects & fd and not self._spec.tee & fd
            source = Source(Process.RANK, fd, rank, prefix.encode())
            shown = None if hidden else Relay(self._console, source)
            streams.append(Stream(log, self._files, prefix, shown))
        return streams

    async def error_of(
        self, rank: int, read: Callable[[], ErrorRecord | None]
    ) -> ErrorRecord | None:
        """Read the error that a rank wrote; None: it wrote none, or the file system hangs."""
        try:
            return await asyncio.wait_for(started(read), ERROR_S)
        except Exception as error:  # the agent must still report the end
            say(f"the agent cannot read the error file of rank {rank}: {error!r}")
            return None

    def close(self) -> None:
        """Write the remaining output to the files, as long as that makes progress."""
        for each in self._helpers:
            each.close()
        self._helpers = []
        self._files.close(END_S)
