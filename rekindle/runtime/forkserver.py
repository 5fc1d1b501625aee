"""The agent's side of the zygote: start it, ask it for processes."""

from __future__ import annotations

import asyncio
import collections
import socket
import subprocess
import sys

import msgspec

from rekindle.errors import RekindleError
from rekindle.runtime.zygote import MAX_REQUEST, Forked, RunRank, RunStore

PRELOAD = "torch,torch.distributed,torch._dynamo"


class ZygoteGoneError(RekindleError):
    """The zygote ended; ranks cannot be forked until another is started."""


class ForkServer:
    """One zygote and the requests that wait for its answers, in order."""

    def __init__(self, environment: dict[str, str], *, preload: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._answers: collections.deque[asyncio.Future[Forked]] = collections.deque()
        command = [sys.executable, "-m", "rekindle.runtime.zygote"]
        command += ["--socket", str(theirs.fileno())]
        if preload:
            command += ["--preload", PRELOAD]
        self.process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._on_answer)

    async def fork(self, request: RunRank | RunStore, fds: list[int]) -> int:
        """Fork a process; it becomes a child of this one. Return its pid.

        Raises ZygoteGoneError; RekindleError: the machine has no room for another process.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Forked] = loop.create_future()
        data = msgspec.msgpack.encode(request)
        if len(data) > MAX_REQUEST:
            raise RekindleError(f"environment and arguments have {len(data)} bytes, too many")
        # Blocking is fine: the zygote reads whenever it does not fork, and requests are few.
        self._socket.setblocking(True)
        try:
            socket.send_fds(self._socket, [data], fds)
        except OSError as error:
            raise ZygoteGoneError(f"the zygote is gone: {error}") from error
        finally:
            self._socket.setblocking(False)
        self._answers.append(answer)
        forked = await answer
        if forked.error:
            raise RekindleError(forked.error)
        return forked.pid

    def _on_answer(self) -> None:
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            while self._answers:
                self._answers.popleft().set_exception(ZygoteGoneError("the zygote ended"))
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(msgspec.msgpack.decode(data, type=Forked))

    def close(self) -> None:
        """End the zygote."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self.process.kill()
        self.process.wait()
