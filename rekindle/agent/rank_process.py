"""One rank as its agent sees it: process, line, heartbeat page, snapshots and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from rekindle import names
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as protocol
from rekindle.protocol import codec as wire
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.channel import MAX_MESSAGE
from rekindle.recovery.faults.fault import ErrorRecord, Exit

_REAP_S = 1.0


class RankProcess:
    """A live rank. `on_message(rank, message)` and `on_exit(rank, exit)` are called by the loop.

    logs: where its output is, and what it writes of its end and of its stacks.
    """

    def __init__(self, rank: int, line: socket.socket, page: HeartbeatPage, logs: Path) -> None:
        self.rank = rank
        self.pid = 0
        self.page = page
        self.ending = False
        self._line = line
        self.stack_file = logs / names.STACK_FILE
        self._error_file = logs / names.ERROR_FILE
        self._pidfd = -1
        self._on_message: Callable[[RankProcess, protocol.Message], None] | None = None
        line.setblocking(False)

    def watch(
        self,
        pid: int,
        on_message: Callable[[RankProcess, protocol.Message], None],
        on_exit: Callable[[RankProcess, Exit], None],
    ) -> None:
        """Listen to the process: the kernel itself says when it ends."""
        self.pid, self._on_message = pid, on_message
        self._pidfd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._ended, on_exit)
        loop.add_reader(self._line, self._readable)

    def send(self, message: protocol.Message, fds: list[int] | None = None) -> None:
        """Send to the rank; one that is gone or does not listen is seen by its exit or a limit."""
        with contextlib.suppress(ConnectionError, BlockingIOError):
            socket.send_fds(self._line, [wire.encode(message)], fds or [])

    def signal(self, number: int) -> None:
        """Signal the rank and the processes it started in its session."""
        if self.pid:
            try:
                os.killpg(self.pid, number)
            except (
                ProcessLookupError
            ):  # it has not become the leader of its session yet, or is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def error(self) -> ErrorRecord | None:
        """Read what the rank wrote about its own end, in torchrun's format; for a thread."""
        try:
            content = json.loads(self._error_file.read_text())["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if isinstance(content, str):
            return ErrorRecord(message=content)
        if not isinstance(content, dict):
            return ErrorRecord(message=str(content))
        extra = content.get("extraInfo", {})
        return ErrorRecord(
            message=str(content.get("message", "")),
            traceback=str(extra.get("py_callstack", "")),
            at=_number(extra.get("timestamp")),
        )

    def _readable(self) -> None:
        assert self._on_message is not None
        while True:
            try:
                data = self._line.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._line)
                return
            try:
                message = wire.decode_from_rank(data)
                if message.ranks_named != (self.rank,):
                    raise ProtocolError("it speaks for another rank")
            except ProtocolError as error:
                # A script that writes to our descriptor broke its own line: it can only be ended.
                print(f"rekindle: rank {self.rank}: {error}", flush=True)
                self.signal(signal.SIGKILL)
                return
            self._on_message(self, message)

    def _ended(self, on_exit: Callable[[RankProcess, Exit], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._readable()  # what it said just before its end still counts
        loop.remove_reader(self._line)
        self._line.close()
        # Helpers it left behind (data loader workers); before its pid may be given anew.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        # They are our children now; the kernel ends them in a moment.
        loop.call_later(_REAP_S, _reap, self.pid)
        on_exit(self, Exit.of(os.waitstatus_to_exitcode(status)))


def _reap(group: int) -> None:
    """Reap what is left of a process group whose leader was reaped before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return 0.0
