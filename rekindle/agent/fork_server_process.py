"""The fork server: a process that has imported the framework once and forks ranks in milliseconds.

It starts no thread, no device context and no process group. It forks each rank twice, so that the
rank becomes a child of the agent, which is a child subreaper. The agent sees the end of the rank
directly, and the death of the fork server ends no rank.

Each request has one file descriptor: the connection of the new process, on which the process waits
for its order. So the fork server can fork a process in advance, and only the order remains. The
connection then becomes the channel of a rank, or of the process that hosts the store.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.leftovers import cleans
from rekindle.rank import program, sources
from rekindle.rank.program import die_with_parent, outlive_parent

MAX_ORDER = 192 * 1024  # the limit of one message on a SEQPACKET socket, by default


class RunRank(msgspec.Struct, frozen=True, kw_only=True, tag="rank"):
    """Become a rank. Its descriptors: heartbeat page, stdout, stderr."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str


class RunStore(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    """Become the host of the ranks' store."""

    port: int


class RunScheduler(msgspec.Struct, frozen=True, kw_only=True, tag="scheduler"):
    """Become MindSpore's scheduler. log: the file for its output.

    port: 0: any free one.
    """

    port: int
    environment: dict[str, str]
    log: str


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """The answer to a request: a child of the agent, or an error."""

    pid: int
    error: str = ""


ForkOrder = RunRank | RunStore | RunScheduler
_ORDER: msgspec.msgpack.Decoder[ForkOrder] = msgspec.msgpack.Decoder(ForkOrder)


def _preload(modules: Iterable[str]) -> None:
    """Import the modules that are installed.

    The garbage collector is off during the import. With it the import of torch 2.13 takes 2.0 s of
    a core, without it 1.4 s. The collector does not write to frozen objects, so ranks share their
    pages. A module may have a function `before_fork()` that does work for all ranks.
    """
    gc.disable()
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]):
            module = importlib.import_module(name)
            getattr(module, "before_fork", lambda: None)()
    sources.skip_loaded()
    gc.freeze()
    gc.enable()


def main() -> None:
    """Import the requested modules, then serve fork requests until the agent ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--preload", default="")
    options = parser.parse_args()
    agent = options.agent
    die_with_parent(agent)
    _preload(filter(None, options.preload.split(",")))
    wire = socket.socket(fileno=options.socket)
    outlive_parent()  # from now on `wire` shows the agent's end
    child = serve(wire, agent)
    if child is None:
        os._exit(0)  # no work is left, and the teardown of the imported modules takes time
    child()


def serve(wire: socket.socket, agent: int) -> Callable[[], None] | None:
    """Answer requests. Return None in the fork server, and in a forked process its work."""
    forked: set[int] = set()
    while True:
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):  # the agent died with an answer unread
            data, fds, _, _ = socket.recv_fds(wire, 1, 1)
        if not data:
            end_sessions(forked)
            return None
        connection = socket.socket(fileno=fds[0])
        try:
            child = fork_twice(agent)
        except OSError as error:
            answer = ForkAnswer(pid=0, error=f"cannot fork: {error}")
        else:
            if child is None:
                wire.close()
                return lambda: handle(connection)
            forked.add(child)
            answer = ForkAnswer(pid=child)
        connection.close()
        with contextlib.suppress(ConnectionError):  # the agent died; the next read shows it
            wire.send(msgspec.msgpack.encode(answer))


def handle(connection: socket.socket) -> None:
    """Wait for this process's order and carry it out."""
    data, fds, _, _ = socket.recv_fds(connection, MAX_ORDER, 3)
    if not data:
        os._exit(0)  # the agent never used this process
    order = _ORDER.decode(data)
    match order:
        case RunStore():
            host_store(connection, order.port)
        case RunScheduler():
            host_scheduler(connection, order)
        case RunRank():
            page, stdout, stderr = fds
            program.take_streams(stdout, stderr)
            descriptors = {
                names.ENV_CHANNEL_FD: str(connection.detach()),
                names.ENV_HEARTBEAT_FD: str(page),
            }
            environment = order.environment | descriptors
            program.run(
                order.kind, order.target, order.arguments, environment, order.working_directory
            )


def fork_twice(agent: int) -> int | None:
    """Fork a child of the agent; return its pid, or None in the child.

    Raises OSError: the machine cannot start another process.
    """
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child:
            os._exit(0)
        os.close(go_write)
        os.close(pid_read)
        os.setsid()  # before any process knows the pid: the agent may signal the session
        os.write(pid_write, os.getpid().to_bytes(8, "little"))
        os.close(pid_write)
        os.read(go_read, 1)  # returns when the fork server has reaped the intermediate process
        os.close(go_read)
        die_with_parent(agent)
        return None
    os.close(pid_write)
    os.close(go_read)
    found = os.read(pid_read, 8)
    os.close(pid_read)
    os.waitpid(between, 0)
    os.close(go_write)
    if not found:
        raise OSError("the second fork failed")
    return int.from_bytes(found, "little")


def end_sessions(leaders: set[int]) -> None:
    """Kill the processes that ranks have started, also those in sessions of their own.

    A killed agent cannot do this, and the kernel ends only the ranks themselves.

    Another session may have the number of an old one by now, so the environment must be that of
    this agent, or of a job.
    """
    own = Path("/proc/self/environ").read_bytes()
    mark = f"{names.ENV_AGENT}={os.environ[names.ENV_AGENT]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            number = int(process.name)
            environment = (process / "environ").read_bytes()
            of_session = os.getsid(number) in leaders and (
                environment == own or f"{names.ENV_JOB_ID}=".encode() in environment
            )
            helps = environment != own and mark in environment.split(b"\0")
            if (of_session or helps) and not cleans(number):
                os.kill(number, signal.SIGKILL)


def host_store(channel: socket.socket, port: int) -> None:
    """Host a TCPStore until the agent closes the channel; first send it the port (or the error)."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore  # torch.distributed's; typed only there

    try:
        # torch would create an IPv6 socket, and look up the peer's mapped address for each
        # connection. The look-up waits if no name service answers. So this socket is IPv4.
        listener = socket.create_server(("", port), backlog=1024)
        store = TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )
    except Exception as error:  # torch has no narrower type; the text goes to the agent
        text = str(error).splitlines()[0]
        channel.send(msgspec.msgpack.encode({"port": 0, "error": text}))
        os._exit(1)
    channel.send(msgspec.msgpack.encode({"port": store.port, "error": ""}))
    with contextlib.suppress(OSError):
        channel.recv(1)
    os._exit(0)  # a normal end would wait for the store's clients


def free_port(wanted: int) -> tuple[int, str]:
    """Find a port for a server that another library starts: `wanted`, or any if that is 0."""
    with socket.socket() as probe:
        try:
            probe.bind(("", wanted))
        except OSError as error:
            return 0, f"port {wanted}: {error.strerror}"
        return probe.getsockname()[1], ""


def host_scheduler(channel: socket.socket, order: RunScheduler) -> None:
    """Run the scheduler until the agent ends this process; first send the port (or the error)."""
    port, error = free_port(order.port)
    channel.send(msgspec.msgpack.encode({"port": port, "error": error}))
    if error:
        os._exit(1)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.clear()
    os.environ.update(order.environment, MS_SCHED_HOST="0.0.0.0", MS_SCHED_PORT=str(port))
    from mindspore.communication import init  # ranks wait until it listens

    init()  # it returns, or exits, after the end of all ranks
    os._exit(0)


if __name__ == "__main__":
    main()
