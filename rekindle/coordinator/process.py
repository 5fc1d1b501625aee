"""The coordinator's process: it carries out the machine's commands, and connects to agents.

    ws   /agent    agents, one websocket each

`rekindle.coordinator.http_api` serves users and flows. Every request must have the job's secret.
The process belongs to the job, not to the flow run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import gc
import ipaddress
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from rekindle import names
from rekindle.coordinator.http_api import HttpApi
from rekindle.coordinator.machine import job_state as state
from rekindle.coordinator.machine.inheritance import earlier, inheritance
from rekindle.coordinator.machine.machine import Machine
from rekindle.errors import ProtocolError, RekindleError
from rekindle.job import lifeline
from rekindle.job.journal_file import JournalFile
from rekindle.job.spec import Endpoint, JobDirectory, is_authorized
from rekindle.protocol.agent import decode_from_agent, encode
from rekindle.recovery.journal import journal

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

LOOK_S = 0.25
PING_AFTER = 12  # checks: the coordinator pings an agent after 3 s of silence
LOST_AFTER = 18  # and it closes the connection after 4.5 s: the node is lost

Send = Callable[[bytes], Awaitable[None]]


class AgentConnection:
    """The websocket of one agent.

    The silence of an agent is a number of checks, not of seconds. If the coordinator is busy with
    thousands of agents, it reads the waiting messages before the next check. An agent that sends
    messages therefore never counts as silent.
    """

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport | None
    ) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[tuple[Send, bytes]] = asyncio.Queue()
        self._checks = 0  # since the last frame

    def tell(self, message: bytes) -> None:
        """Queue an encoded message. The connection sends messages in order."""
        self._queue.put_nowait((self._socket.send_bytes, message))

    def answer(self, ping: bytes) -> None:
        """Queue the answer to an agent's ping."""
        self._queue.put_nowait((self._socket.pong, ping))

    async def send_all(self) -> None:
        """Send queued messages until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                send, data = await self._queue.get()
                await send(data)

    def note_message(self) -> None:
        """Note that a frame has arrived."""
        self._checks = 0

    def check(self) -> None:
        """Count a check. Ping a silent agent, and close the connection if it remains silent."""
        self._checks += 1
        if self._checks == PING_AFTER:
            self._queue.put_nowait((self._socket.ping, b""))
        elif self._checks == LOST_AFTER and self._transport is not None:
            text = (
                "the coordinator closed a connection, because the agent sent nothing for "
                f"{LOST_AFTER * LOOK_S:g} s"
            )
            print(f"rekindle coordinator: {text}", file=sys.stderr, flush=True)
            self._transport.abort()


async def watch(connections: Mapping[int, AgentConnection]) -> None:
    """Check all connections every LOOK_S, without an end."""
    while True:
        await asyncio.sleep(LOOK_S)
        for connection in connections.values():
            connection.check()


FAREWELL_S = 15.0  # limit for all agents to disconnect after EndAgent
PROGRESS_S = 0.5
TABLES_AFTER_S = 1.0  # after the start: the ranks import their framework then
BACKLOG = 4096  # connections that wait to be accepted; a refused agent retries late
GARBAGE_AFTER = 50_000  # new objects between two garbage collections; default: 700 or 2,000
KEPT_BYTES = 16 << 20  # freed memory that the process keeps, at most
# Parameters of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
OTHER_FILES = 64  # open files besides agents' connections: journal, followers, Python's own


_loading = threading.Lock()


def load_tables(user_file: str) -> Tables:
    """Return the tables of faults. Only the first call reads them; others wait for it.

    The coordinator makes this call before it needs the tables, if there is time.
    Raises UsageError: the user's file cannot be used.
    """
    # msgspec 0.22 can crash if two threads decode a class for the first time at the same time.
    with _loading:
        return _read_tables(user_file)


@functools.cache
def _read_tables(user_file: str) -> Tables:
    from rekindle.recovery.faults.tables.tables import Tables

    return Tables.load(Path(user_file) if user_file else None)


class Coordinator:
    """One attempt of a job."""

    def __init__(self, directory: JobDirectory, attempt: int) -> None:
        self.directory = directory
        self.spec = directory.spec()
        self.journal_file = JournalFile(directory.journal_file)
        past = self.journal_file.events
        self.tables = functools.partial(load_tables, self.spec.fault_tables)
        self.machine = Machine(self.spec, self.tables, attempt=attempt, earlier=earlier(past))
        self._inherited = inheritance(past, attempt)
        self.http_api = HttpApi(self.machine, self.journal_file, self.carry_out)
        self.ended = asyncio.Event()
        self.succeeded = False
        self._agent_connections: dict[int, AgentConnection] = {}
        self._timers: dict[state.Timer, asyncio.TimerHandle] = {}

    # ---- carrying out

    def carry_out(self) -> None:
        """Carry out all commands of the machine."""
        last, encoded = None, b""  # a message to all agents is one object in consecutive commands
        for command in self.machine.job.drain():
            match command:
                case state.Send(connection, message):
                    agent_connection = self._agent_connections.get(connection)
                    if agent_connection is None:
                        continue
                    if message is not last:
                        last, encoded = message, encode(message)
                    agent_connection.tell(encoded)
                case state.Record(event):
                    self.journal_file.append(event)
                case state.SetTimer(timer, seconds):
                    self._set_timer(timer, seconds)
                case state.CancelTimer(timer):
                    self._cancel_timer(timer)
                case state.End(succeeded):
                    self.succeeded = succeeded
                    self.ended.set()

    def _set_timer(self, timer: state.Timer, seconds: float) -> None:
        self._cancel_timer(timer)
        loop = asyncio.get_running_loop()
        self._timers[timer] = loop.call_later(seconds, self._on_timer, timer)

    def _cancel_timer(self, timer: state.Timer) -> None:
        running = self._timers.pop(timer, None)
        if running is not None:
            running.cancel()

    def _on_timer(self, timer: state.Timer) -> None:
        self.machine.on_timer(timer, time.time())
        self.carry_out()

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the job."""
        self.machine.endings.stop(reason, at_once=at_once)
        self.carry_out()

    # ---- agents

    async def agent(self, request: web.Request) -> web.StreamResponse:
        """Serve one agent's connection until it ends. Refuse an agent of another wire version."""
        version = request.headers.get(names.HEADER_WIRE, str(names.WIRE_VERSION))
        if version != str(names.WIRE_VERSION):
            text = (
                f"the coordinator refused the agent at {request.remote}, because its wire "
                f"version is {version[:20]!r}"
            )
            print(f"rekindle coordinator: {text}", file=sys.stderr, flush=True)
            ours = {names.HEADER_WIRE: str(names.WIRE_VERSION)}
            return web.Response(status=HTTPStatus.UPGRADE_REQUIRED, headers=ours)
        socket = web.WebSocketResponse(autoping=False, max_msg_size=16 << 20)
        await socket.prepare(request)
        connection = id(socket)
        agent_connection = self._agent_connections[connection] = AgentConnection(
            socket, request.transport
        )
        sender = asyncio.create_task(agent_connection.send_all())
        try:
            await self._listen(socket, connection)
        finally:
            sender.cancel()
            del self._agent_connections[connection]
            self.machine.losses.on_agent_lost(connection, time.time())
            self.carry_out()
        return socket

    async def _listen(self, socket: web.WebSocketResponse, connection: int) -> None:
        agent_connection = self._agent_connections[connection]
        async for frame in socket:
            agent_connection.note_message()
            if frame.type is WSMsgType.PONG:
                continue
            if frame.type is WSMsgType.PING:
                agent_connection.answer(frame.data)
                continue
            try:
                if frame.type is not WSMsgType.BINARY:
                    raise ProtocolError(
                        f"an agent sent a frame of type {frame.type.name} instead of a binary frame"
                    )
                message = decode_from_agent(frame.data)
                self.machine.on_message(connection, message, time.time())
            except ProtocolError as error:
                print(
                    "rekindle coordinator: the coordinator closed the connection of an agent: "
                    f"{error}",
                    file=sys.stderr,
                    flush=True,
                )
                await socket.close(code=1008, message=str(error).encode()[:120])
                return
            self.carry_out()

    async def report_progress(self) -> None:
        """Send the steps of the ranks to followers whenever they change."""
        last: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(PROGRESS_S)
            machine = self.machine
            finished = min(rank.finished for rank in machine.job.roster.world)
            if last != (finished, machine.job.newest):
                last = (finished, machine.job.newest)
                self.journal_file.publish(
                    journal.Progress(
                        at=time.time(),
                        finished=finished,
                        newest=machine.job.newest,
                        total=machine.checkpoints.total,
                        metrics=machine.checkpoints.metrics,
                    )
                )

    # ---- life

    async def run(self, listener: socket.socket) -> int:
        """Serve until the job is over. Return the exit status."""
        loop = asyncio.get_running_loop()
        loop.call_later(TABLES_AFTER_S, loop.run_in_executor, None, self.tables)
        app = application(self.directory)
        app.router.add_get(names.PATH_AGENT, self.agent)
        self.http_api.serve(app.router)
        # aiohttp cancels a handler when its client disconnects, so a lease ends with its holder.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        self._announce(listener)
        self.machine.takeover.start(self._inherited)
        self.carry_out()
        progress = asyncio.create_task(self.report_progress())
        watching = asyncio.create_task(watch(self._agent_connections))
        await self.ended.wait()
        await self._see_agents_off()
        progress.cancel()
        watching.cancel()
        self.journal_file.close()
        await runner.cleanup()
        return 0 if self.succeeded else 1

    def _announce(self, listener: socket.socket) -> None:
        if self._inherited is None:
            started = journal.JobStarted(
                job_id=self.spec.job_id,
                attempt=self.machine.job.attempt,
                nodes=self.spec.nodes,
                processes_per_node=self.spec.processes_per_node,
                spares=self.spec.spares,
                pid=os.getpid(),
            )
            self.journal_file.append(started)
        host, port = listener.getsockname()[:2]
        endpoint = Endpoint(
            host=names.LOOPBACK if host == "0.0.0.0" else host,
            port=port,
            pid=os.getpid(),
            attempt=self.machine.job.attempt,
        )
        self.directory.announce(endpoint)

    async def _see_agents_off(self) -> None:
        deadline = time.monotonic() + FAREWELL_S
        while self._agent_connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def application(directory: JobDirectory, *, client_max_size: int = 1 << 20) -> web.Application:
    """Return a web application that refuses a request without the job's secret.

    A process on this machine may report health events with the token of monitors instead.

    client_max_size: the longest body of a request, in bytes; 0: any length.
    """
    secret, job_id = directory.secret(), directory.spec().job_id
    token = directory.monitor_token()

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(names.HEADER_SECRET) or request.headers.get("Authorization")
        reports = request.path == names.PATH_HEALTH_EVENTS and _is_local(request.remote)
        is_monitor = bool(token) and reports and is_authorized(given, token)
        if is_monitor or is_authorized(given, secret):
            return await handler(request)
        known = f"give the secret of this job in {names.ENV_SECRET}"
        error = f"wrong or missing secret for job {job_id}; {known}"
        return web.json_response({"error": error}, status=401)

    return web.Application(middlewares=[authorize], client_max_size=client_max_size)


def _is_local(remote: str | None) -> bool:
    """Return whether a request comes from this machine over its loopback address."""
    return remote is not None and ipaddress.ip_address(remote).is_loopback


def allow_files(needed: int) -> None:
    """Raise the limit of open files to the hard limit, because a soft limit is often 1024.

    Print a warning if the hard limit is less than `needed`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"the limit is {hard} open files, but this job may need {needed}; raise ulimit -Hn"
        print(f"rekindle coordinator: {text}", file=sys.stderr, flush=True)


async def serve(options: argparse.Namespace) -> int:
    """Run the coordinator until the job is over or a signal stops it."""
    coordinator = Coordinator(JobDirectory(options.directory), options.attempt)
    allow_files(coordinator.spec.nodes + coordinator.spec.spares + OTHER_FILES)
    loop = asyncio.get_running_loop()
    signals = iter((False, *(True,) * 1000))

    def on_signal(name: str) -> None:
        coordinator.stop(f"stopped by {name}", at_once=next(signals))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    lifeline.watch(
        options.lifeline_fd,
        lambda: coordinator.stop("the process that launched the job has ended", at_once=True),
    )
    return await coordinator.run(socket.socket(fileno=options.listen_fd))


def tune_memory() -> None:
    """Make garbage collections rare, and keep freed memory in the process.

    A regroup creates many objects, so Python would collect garbage often. Each collection takes a
    second with the connections of 16,384 agents.
    asyncio reads each message into a new buffer of 256 KiB. glibc would get this memory from the
    kernel and return it for each message. With 1,024 agents this takes about half of the
    coordinator's CPU time (benchmarks/coordinator_scale.py). Other C libraries do not have mallopt.
    """
    gc.set_threshold(GARBAGE_AFTER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def main() -> None:
    """Run the coordinator of one attempt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, default=-1)
    options = parser.parse_args()
    tune_memory()
    try:
        status = asyncio.run(serve(options))
    except RekindleError as error:
        print(f"rekindle coordinator: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
