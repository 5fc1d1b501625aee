"""The agent's view of one rank: process, connection, heartbeat page, snapshots and output."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rekindle import names
from rekindle.agent.fork_server import Child
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as protocol
from rekindle.protocol import codec as wire
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.recovery.faults.fault import ErrorRecord, Exit


class RankProcess:
    """A live rank. The event loop calls `on_message(rank, message)` and `on_exit(rank, exit)`.

    logs: the directory of its output, its error file and its stacks.
    """

    def __init__(self, rank: int, child: Child, page: HeartbeatPage, logs: Path) -> None:
        self.rank = rank
        self.page = page
        self._child = child
        self.pid, self.signal = child.pid, child.signal
        self.stack_file = logs / names.STACK_FILE
        self._error_file = logs / names.ERROR_FILE

    def watch(
        self,
        on_message: Callable[[RankProcess, protocol.Message], None],
        on_exit: Callable[[RankProcess, Exit], None],
    ) -> None:
        """Watch the process and its messages; the kernel reports its end."""
        hear = functools.partial(self._hear, on_message)
        self._child.watch(hear, functools.partial(on_exit, self))

    def send(self, message: protocol.Message, fds: list[int] | None = None) -> None:
        """Send to the rank. The agent finds a dead rank by its exit, a silent one by a limit."""
        with contextlib.suppress(ConnectionError, BlockingIOError):
            socket.send_fds(self._child.line, [wire.encode(message)], fds or [])

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

    def _hear(
        self, on_message: Callable[[RankProcess, protocol.Message], None], data: bytes
    ) -> None:
        try:
            message = wire.decode_from_rank(data)
            if message.ranks_named != (self.rank,):
                raise ProtocolError("it sent a message for another rank")
        except ProtocolError as error:
            # A script that writes to our descriptor has broken its connection. The agent can only
            # end it.
            print(f"rekindle agent: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            self.signal(signal.SIGKILL)
        else:
            on_message(self, message)


def _number(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return 0.0
