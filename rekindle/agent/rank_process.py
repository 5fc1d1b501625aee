"""The agent's view of one rank: process, connection, heartbeat page, snapshots and output."""

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
    """A live rank. The event loop calls `on_message(rank, message)` and `on_exit(rank, exit)`.

    logs: the directory of its output, its error file and its stacks.
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
        """Watch the process and its messages; the kernel reports its end."""
        self.pid, self._on_message = pid, on_message
        self._pidfd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._ended, on_exit)
        loop.add_reader(self._line, self._readable)

    def send(self, message: protocol.Message, fds: list[int] | None = None) -> None:
        """Send to the rank. The agent finds a dead rank by its exit, a silent one by a limit."""
        with contextlib.suppress(ConnectionError, BlockingIOError):
            socket.send_fds(self._line, [wire.encode(message)], fds or [])

    def signal(self, number: int) -> None:
        """Signal the rank and the processes it started in its session."""
        if self.pid:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it does not yet lead its session, or it has ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def error(self) -> ErrorRecord | None:
        """Read the rank's error file, in torchrun's format. For a thread."""
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
                    raise ProtocolError("it sent a message for another rank")
            except ProtocolError as error:
                # A script that writes to our descriptor has broken its connection. The agent can
                # only end it.
                print(f"rekindle: rank {self.rank}: {error}", flush=True)
                self.signal(signal.SIGKILL)
                return
            self._on_message(self, message)

    def _ended(self, on_exit: Callable[[RankProcess, Exit], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._readable()  # messages just before its end still count
        loop.remove_reader(self._line)
        self._line.close()
        # Kill its helpers (data loader workers) before the kernel reuses its pid.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        # They are our children now, and the kernel ends them soon.
        loop.call_later(_REAP_S, _reap, self.pid)
        on_exit(self, Exit.of(os.waitstatus_to_exitcode(status)))


def _reap(group: int) -> None:
    """Reap the rest of a process group whose leader is already reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return 0.0
