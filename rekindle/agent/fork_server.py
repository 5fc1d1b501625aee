"""The agent's side of the fork server: it starts the server and requests processes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from rekindle import names
from rekindle.agent.fork_server_process import MAX_ORDER, ForkAnswer, ForkOrder
from rekindle.agent.leftovers import kill_session
from rekindle.agent.threads import in_thread
from rekindle.console import say
from rekindle.errors import RekindleError
from rekindle.job.addresses import interfaces, is_loopback
from rekindle.job.ascend import ascend_environment, with_commas
from rekindle.job.spec import Framework, JobSpec
from rekindle.rank.channel import MAX_MESSAGE
from rekindle.recovery.faults.fault import Exit

PRELOAD = {
    Framework.TORCH: "torch,torch.distributed,torch._dynamo,rekindle.training.torch",
    # Its import starts no thread that a fork would lose (2.10).
    Framework.MINDSPORE: "mindspore,mindspore.dataset,rekindle.training.mindspore",
}
_REAP_S = 1.0
FORK_SERVERS = 3  # tries to fork a process, each with another fork server


def agent_environment(
    base: Mapping[str, str], spec: JobSpec, address: str, *, simulated: bool = False
) -> dict[str, str]:
    """Return the environment in which the fork server imports the framework and forks ranks.

    Several ranks on one machine get one thread each, as under torchrun, unless the user sets
    another number. torch reads the number at its import.

    gloo looks up the name of the machine, which other machines may not reach or no name service
    knows. So it gets the interface of the machine's address.

    address: of this machine for others; on loopback, all nodes are on this machine. simulated: so
    are they.
    """
    environment = {**base, **spec.environment}
    environment |= ascend_environment(environment, spec.policy)
    if with_commas(environment):
        text = (
            "MS_ENABLE_TFT had no comma between two switches, so MindSpore would ignore the first"
        )
        say(text, logging.WARNING)
    alone = not simulated and not is_loopback(address)
    if (spec.processes_per_node if alone else spec.world_size) > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if alone and (interface := interfaces().get(address)):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment["PYTHONUNBUFFERED"] = "1"
    environment[names.ENV_AGENT] = uuid.uuid4().hex
    return environment


class Child:
    """A forked process, which leads a session, and our end of its connection."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        connection.setblocking(False)

    def watch(self, on_data: Callable[[bytes], None], on_exit: Callable[[Exit], None]) -> None:
        """Call `on_data` with each message of the process, and `on_exit` after its end."""
        pidfd = os.pidfd_open(self.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._ended, pidfd, on_data, on_exit)
        loop.add_reader(self.connection, self._readable, on_data)

    def signal(self, number: int) -> None:
        """Signal the process alone, as torchrun does: workers of a DataLoader inherit its handlers.

        The processes that it started follow when the agent sees its end.
        """
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def _readable(self, on_data: Callable[[bytes], None]) -> None:
        try:
            while data := self.connection.recv(MAX_MESSAGE):
                on_data(data)
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # the process has ended with a message unread
        asyncio.get_running_loop().remove_reader(self.connection)

    def _ended(
        self, pidfd: int, on_data: Callable[[bytes], None], on_exit: Callable[[Exit], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        self._readable(on_data)  # messages just before its end still count
        loop.remove_reader(self.connection)
        self.connection.close()
        kill_session(self.pid)  # data loader workers; before the kernel reuses its pid
        _, status = os.waitpid(self.pid, 0)
        # They are our children now, and the kernel ends them soon.
        loop.call_later(_REAP_S, _reap, self.pid)
        on_exit(Exit.of(os.waitstatus_to_exitcode(status)))


def _reap(group: int) -> None:
    """Reap the rest of a process group whose leader is already reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


Fork = Callable[[ForkOrder, list[int]], Awaitable[Child]]


class ForkServer:
    """One fork server, the pending requests in their order, and a process in reserve.

    preload: the framework that it imports before it forks; None: nothing. streams: its standard
    output and error.
    """

    def __init__(
        self, environment: dict[str, str], streams: tuple[int, int], *, preload: Framework | None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._answers: collections.deque[asyncio.Future[ForkAnswer]] = collections.deque()
        self._reserve: Child | None = None
        self._preparing = False
        self._ended = False
        command = [sys.executable, "-m", "rekindle.agent.fork_server_process"]
        command += ["--socket", str(theirs.fileno()), "--agent", str(os.getpid())]
        if preload is not None:
            command += ["--preload", PRELOAD[preload]]
        stdout, stderr = streams
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        theirs.close()
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._on_answer)

    @property
    def is_asked(self) -> bool:
        """Return whether a request waits for its answer."""
        return bool(self._answers)

    async def was_killed(self) -> bool:
        """Return whether a signal has ended the server. Its connection ends first."""
        if not self._ended:
            return False
        try:
            return await in_thread(self.process.wait, names.KILLED_S) < 0
        except subprocess.TimeoutExpired:
            return False

    async def start(self, order: ForkOrder, fds: list[int]) -> Child:
        """Let a forked process carry out `order`, with these descriptors. Return the process.

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
        if blank is None or not _give(blank, data, fds):
            blank = await self._fork()
            if not _give(blank, data, fds):
                raise RekindleError(
                    f"process {blank.pid} ended before the agent could send it its order"
                )
        return blank

    async def keep_one_ready(self) -> None:
        """Fork a process in advance, so that the next order does not wait for a fork."""
        if self._reserve is not None or self._preparing:
            return
        self._preparing = True
        try:
            self._reserve = await self._fork()
        finally:
            self._preparing = False

    async def _fork(self) -> Child:
        answer: asyncio.Future[ForkAnswer] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                self._ended = True
                raise RekindleError(f"the fork server has ended: {error}") from error
        self._answers.append(answer)
        try:
            forked = await answer
            if forked.error:
                raise RekindleError(forked.error)
        except BaseException:
            ours.close()
            raise
        return Child(forked.pid, ours)

    def _on_answer(self) -> None:
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._ended = True
            for waiting in self._answers:
                if not waiting.done():
                    waiting.set_exception(RekindleError("the fork server ended"))
            self._answers.clear()
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(msgspec.msgpack.decode(data, type=ForkAnswer))

    def close(self) -> None:
        """End the fork server and the process in reserve, whose connection closes."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._reserve is not None:
            self._reserve.connection.close()
            self._reserve = None
        self.process.kill()
        try:
            self.process.wait(names.KILLED_S)
        except subprocess.TimeoutExpired:  # a read of a file system that hangs delays the end
            say(f"the fork server {self.process.pid} did not end after SIGKILL")


class ForkServers:
    """The fork server of an agent, and its successors. A signal may end it, also while it imports.

    environment: of the servers. streams: returns the descriptors of their standard output and
    standard error.
    """

    def __init__(self, environment: dict[str, str], streams: Callable[[], tuple[int, int]]) -> None:
        self._environment, self._streams = environment, streams
        self._preload: Framework | None = None
        self._server: ForkServer | None = None

    def begin(self, preload: Framework | None) -> None:
        """Start a fork server that imports this framework."""
        self._preload = preload
        self._server = ForkServer(self._environment, self._streams(), preload=preload)

    @property
    def asked(self) -> list[int]:
        """The pid of the fork server if a request waits for its answer."""
        server = self._server
        return [server.process.pid] if server is not None and server.is_asked else []

    async def fork(self, request: ForkOrder, fds: list[int]) -> Child:
        """Fork a process that carries out the request.

        Raises RekindleError: this is not possible, also with several fork servers in succession.
        """
        for left in reversed(range(FORK_SERVERS)):
            server = self._living()
            try:
                return await server.start(request, fds)
            except RekindleError as error:
                if not left or not await server.was_killed():
                    raise
                say(f"{error}; the agent starts another one")
        raise AssertionError("the last try returns or raises")

    async def keep_one_ready(self) -> None:
        """Fork a process in advance, see `ForkServer`."""
        assert self._server is not None
        await self._server.keep_one_ready()

    def _living(self) -> ForkServer:
        assert self._server is not None
        if self._server.process.poll() is not None:
            self._server.close()
            self.begin(self._preload)
        return self._server

    def close(self) -> None:
        """End the fork server."""
        if self._server is not None:
            self._server.close()


def _give(blank: Child, data: bytes, fds: list[int]) -> bool:
    """Send a waiting process its order; False: the process has ended."""
    try:
        socket.send_fds(blank.connection, [data], fds)
    except OSError as error:
        blank.connection.close()
        if not isinstance(error, ConnectionError):
            raise
        return False
    return True
