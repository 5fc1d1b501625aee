"""The process that hosts the ranks' store, as the agent of its node sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import msgspec

from rekindle.runtime import protocol


class StoreProcess:
    """The process that hosts the ranks' store, forked from the zygote."""

    def __init__(
        self,
        pid: int,
        line: socket.socket,
        order: protocol.HostStore,
        send: Callable[[protocol.Message], None],
    ) -> None:
        self._pid, self._line, self._order, self._send = pid, line, order, send
        self._up = False
        line.setblocking(False)
        asyncio.get_running_loop().add_reader(line, self._readable)

    def _readable(self) -> None:
        try:
            data = self._line.recv(4096)
        except ConnectionError:
            data = b""
        if data:
            answer = msgspec.msgpack.decode(data)
            self._up = True
            self._send(protocol.StoreUp(serial=self._order.serial, **answer))
            return
        asyncio.get_running_loop().remove_reader(self._line)
        if self._up:
            self._send(protocol.StoreDown(serial=self._order.serial))
        else:
            text = "the process of the ranks' store ended before it listened"
            self._send(protocol.StoreUp(serial=self._order.serial, port=0, error=text))

    def end(self) -> None:
        """End the process and reap it."""
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def free_port(wanted: int) -> tuple[int, str]:
    """Find a port for a program that hosts its own store: `wanted`, or any if that is 0."""
    with socket.socket() as probe:
        try:
            probe.bind(("", wanted))
        except OSError as error:
            return 0, f"port {wanted}: {error.strerror}"
        return probe.getsockname()[1], ""
