"""What ranks print: to a file each, and (prefixed) to the agent's own streams."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # a longer line is shown in pieces; the file has it whole


class Console:
    """The agent's own standard streams, written by a thread of their own.

    A terminal that is held (Ctrl-S, a pager) must not hold the agent: its heartbeats would stop
    and the node would be taken for lost.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def show(self, fd: int, data: bytes) -> None:
        """Write `data` to descriptor `fd` in its turn."""
        self._waiting.put((fd, data))

    def close(self, limit_s: float) -> None:
        """Write what waits, for at most so long."""
        self._waiting.put(None)
        self._thread.join(limit_s)

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            fd, data = item
            try:
                while data:
                    data = data[os.write(fd, data) :]
            except OSError:
                continue  # whoever watched has gone (`rekindle run | head`); the files have it all


class Stream:
    """One stream of one rank. fd: what the rank writes to."""

    def __init__(self, path: Path, *, console: Console, show_on: int | None, prefix: bytes) -> None:
        self.path = path
        self._console = console
        self._show_on = show_on
        self._prefix = prefix
        self._pending = b""
        self._told = False
        self._file: BinaryIO = path.open("ab", buffering=0)
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
            self._keep(data)
            if self._show_on is not None:
                self._show(data)

    def _keep(self, data: bytes) -> None:
        """Append to the log; a disk that is full costs lines, not ranks."""
        try:
            self._file.write(data)
        except OSError as error:
            if not self._told:
                self._told = True
                text = f"rekindle: {self.path}: {error.strerror}; lines are lost\n"
                self._console.show(2, text.encode())

    def _show(self, data: bytes) -> None:
        *lines, rest = (self._pending + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._pending = rest
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        assert self._show_on is not None
        self._console.show(self._show_on, data)

    def _finish(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1
        if self._pending and self._show_on is not None:
            self._write(self._prefix + self._pending + b"\n")
        self._file.close()
