"""The agent's side of the fork server: it starts the server and requests processes."""

from __future__ import annotations

import asyncio
import collections
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from rekindle.agent.fork_server_process import MAX_ORDER, Forked, ForkOrder
from rekindle.errors import RekindleError
from rekindle.job.spec import Framework

PRELOAD = {
    Framework.TORCH: "torch,torch.distributed,torch._dynamo,rekindle.training.torch",
    # Its import starts no thread that a fork would lose (2.10).
    Framework.MINDSPORE: "mindspore,mindspore.dataset,rekindle.training.mindspore",
}


Fork = Callable[[ForkOrder, list[int]], Awaitable[int]]


async def fork_with_line(
    fork: Fork, order: ForkOrder, fds: Sequence[int] = ()
) -> tuple[int, socket.socket]:
    """Fork a process with a socket connection; return its pid and our end of the connection.

    fds: the descriptors that follow the connection's. Raises the errors of `fork`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            return await fork(order, [theirs.fileno(), *fds]), ours
        except BaseException:
            ours.close()
            raise


class _Blank(NamedTuple):
    """A forked process that waits for its order on `line`."""

    pid: int
    line: socket.socket


class ForkServer:
    """One fork server, the pending requests in their order, and a process in reserve.

    preload: the framework that it imports before it forks; None: nothing.
    """

    def __init__(self, environment: dict[str, str], *, preload: Framework | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._answers: collections.deque[asyncio.Future[Forked]] = collections.deque()
        self._reserve: _Blank | None = None
        self._preparing = False
        command = [sys.executable, "-m", "rekindle.agent.fork_server_process"]
        command += ["--socket", str(theirs.fileno())]
        if preload is not None:
            command += ["--preload", PRELOAD[preload]]
        self.process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._on_answer)

    async def start(self, order: ForkOrder, fds: list[int]) -> int:
        """Let a forked process carry out `order`; it is a child of this one. Return its pid.

        Raises RekindleError: the order is too long, the fork server or the process has ended, or
        the machine cannot start a process.
        """
        data = msgspec.msgpack.encode(order)
        if len(data) > MAX_ORDER:
            raise RekindleError(
                f"environment and arguments have {len(data)} bytes; the fork server accepts at "
                f"most {MAX_ORDER}"
            )
        blank, self._reserve = self._reserve, None
        if blank is not None and _give(blank, data, fds):
            return blank.pid
        blank = await self._fork()
        if not _give(blank, data, fds):
            raise RekindleError(
                f"process {blank.pid} ended before the agent could send it its order"
            )
        return blank.pid

    async def keep_one_ready(self) -> None:
        """Fork a process in advance, so that the next order does not wait for a fork."""
        if self._reserve is not None or self._preparing:
            return
        self._preparing = True
        try:
            self._reserve = await self._fork()
        finally:
            self._preparing = False

    async def _fork(self) -> _Blank:
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RekindleError(f"the fork server has ended: {error}") from error
        self._answers.append(answer)
        try:
            forked = await answer
            if forked.error:
                raise RekindleError(forked.error)
        except BaseException:
            ours.close()
            raise
        return _Blank(forked.pid, ours)

    def _on_answer(self) -> None:
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            for waiting in self._answers:
                if not waiting.done():
                    waiting.set_exception(RekindleError("the fork server ended"))
            self._answers.clear()
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(msgspec.msgpack.decode(data, type=Forked))

    def close(self) -> None:
        """End the fork server and the process in reserve, whose connection closes."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._reserve is not None:
            self._reserve.line.close()
            self._reserve = None
        self.process.kill()
        self.process.wait()


def _give(blank: _Blank, data: bytes, fds: list[int]) -> bool:
    """Send a waiting process its order; False: the process has ended."""
    with blank.line as line:
        try:
            socket.send_fds(line, [data], fds)
        except ConnectionError:
            return False
    return True
