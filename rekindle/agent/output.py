"""The output of ranks: each stream goes to a file, and with a prefix to the agent's own streams."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rekindle import names
from rekindle.agent.threads import Worker
from rekindle.errors import RekindleError, UsageError
from rekindle.job.spec import JobSpec
from rekindle.recovery.faults.fault import ErrorRecord

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes; a longer line is shown in pieces, and the file has it whole
LOGS_S = 60.0  # A log directory that does not answer for so long cannot be used.
ERROR_S = 5.0  # The end of a rank is reported after this time without the rank's own error.
END_S = 2.0
_MOST_WAITING = 64 << 20  # bytes; a file system that takes more time loses lines


class Logs(NamedTuple):
    """The open log files of one process of a rank. directory: it also has the rank's error file."""

    directory: Path
    stdout: int
    stderr: int


def open_logs(directory: Path, metrics_file: Path) -> Logs:
    """Make the directories of a rank's files, remove its old error file, and open its logs.

    Raises UsageError: the agent cannot write to the log directory. Raises OSError: it cannot make
    the directory of the metrics.
    """
    metrics_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / names.ERROR_FILE).unlink(missing_ok=True)
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        stdout, stderr = (
            os.open(directory / f"{name}.log", mode, 0o644) for name in ("stdout", "stderr")
        )
    except OSError as error:
        raise UsageError(f"log directory {directory}: {error.strerror}") from error
    return Logs(directory, stdout, stderr)


class Writer:
    """Writes to descriptors, in a thread of its own.

    A held terminal (Ctrl-S, a pager) or a hanging file system stops neither the agent nor a rank.
    Output that finds no room in memory is lost.
    """

    def __init__(self, name: str) -> None:
        self.worker = Worker(name)
        self._put = self._written = 0  # bytes; only the loop counts the first, the thread the other

    def write(self, fd: int, data: bytes, lost: Callable[[str], None]) -> None:
        """Write the data in its turn. `lost(why)` is called by any thread if that fails."""
        if self._put - self._written > _MOST_WAITING:
            lost("the file system takes no data")
            return
        self._put += len(data)
        self.worker.do(functools.partial(self._write, fd, data, lost))

    def close_file(self, fd: int) -> None:
        """Close a descriptor when all that waits is written."""
        self.worker.do(functools.partial(os.close, fd))

    def _write(self, fd: int, data: bytes, lost: Callable[[str], None]) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError as error:
            lost(str(error.strerror))
        self._written += len(data)


class Stream:
    """One stream of one rank. fd: what the rank writes to.

    log: the open file of the stream, which `files` writes. show_on: the agent's own stream.
    """

    def __init__(
        self, log: int, *, files: Writer, console: Writer, show_on: int | None, prefix: bytes
    ) -> None:
        self._log = log
        self._files = files
        self._console = console
        self._show_on = show_on
        self._prefix = prefix
        self._pending = b""
        self._told = False
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        asyncio.get_running_loop().add_reader(self._read, self._readable)

    def started(self) -> None:
        """Close our copy of the writing end, now that the rank has its own."""
        os.close(self.fd)

    def drain(self) -> None:
        """Take what is left of a rank that ended; helpers may still hold the writing end."""
        if self._read >= 0:
            self._readable()
        if self._read >= 0:
            self._finish()

    def _readable(self) -> None:
        while True:
            try:
                data = os.read(self._read, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._finish()
                return
            self._files.write(self._log, data, self._lost)
            if self._show_on is not None:
                self._show(data)

    def _lost(self, why: str) -> None:
        """Say once that the log lacks lines: a disk that is full costs lines, not ranks."""
        if not self._told:
            self._told = True
            text = f"rekindle: log of {self._prefix.decode()} {why}; lines are lost\n"
            self._console.write(2, text.encode(), _nothing)

    def _show(self, data: bytes) -> None:
        *lines, rest = (self._pending + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._pending = rest
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        assert self._show_on is not None
        # Whoever watched may have gone (`rekindle run | head`); the file has it all.
        self._console.write(self._show_on, data, _nothing)

    def _finish(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1
        if self._pending and self._show_on is not None:
            self._write(self._prefix + self._pending + b"\n")
        self._files.close_file(self._log)


class Output:
    """The output of a node's ranks. Files and console have a thread each."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._console = Writer("rekindle-console")
        self._files = Writer("rekindle-logs")

    async def open(self, rank: int, restart: int, metrics_file: Path) -> Logs:
        """Open the logs of a process of a rank.

        Raises RekindleError, OSError: that cannot be done, or takes longer than LOGS_S.
        """
        directory = Path(self._spec.log_directory, f"attempt_{restart}", str(rank))
        opens = functools.partial(open_logs, directory, metrics_file)
        try:
            return await self._files.worker.result(opens, LOGS_S)
        except asyncio.TimeoutError:
            text = f"log directory {directory}: the file system has not answered for {LOGS_S:g} s"
            raise RekindleError(text) from None

    def streams(self, rank: int, logs: Logs) -> list[Stream]:
        """Make the pipes of a rank: standard output, then standard error."""
        prefix = f"[{self._spec.role}{rank}]:".encode()
        streams = []
        for fd, log in ((1, logs.stdout), (2, logs.stderr)):
            # torchrun's -r sends a stream to its file only, -t to both; both is our default.
            hidden = self._spec.redirects & fd and not self._spec.tee & fd
            show_on = None if hidden else fd
            streams.append(
                Stream(
                    log, files=self._files, console=self._console, show_on=show_on, prefix=prefix
                )
            )
        return streams

    async def error_of(
        self, rank: int, read: Callable[[], ErrorRecord | None]
    ) -> ErrorRecord | None:
        """Read what a rank wrote about its end, once its output is written; None: nothing."""
        try:
            return await self._files.worker.result(read, ERROR_S)
        except Exception as error:  # the end itself must be reported
            text = f"rekindle agent: the error file of rank {rank} cannot be read: {error!r}"
            print(text, file=sys.stderr, flush=True)
            return None

    def close(self) -> None:
        """Write what waits, for END_S at most."""
        for writer in (self._files, self._console):
            writer.worker.close(END_S)


def _nothing(_: str) -> None:
    """Ignore lost output."""
