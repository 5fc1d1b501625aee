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
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import WSMsgType, web

from rekindle import names
from rekindle.console import Process, say, start
from rekindle.coordinator.agent_connection import AgentConnection, watch
from rekindle.coordinator.event_log import EventLog
from rekindle.coordinator.http_api import HttpApi, application
from rekindle.coordinator.inputs import Inputs
from rekindle.coordinator.machine import job_state as state
from rekindle.coordinator.machine.inheritance import earlier, inheritance
from rekindle.coordinator.machine.machine import Machine
from rekindle.errors import ProtocolError, RekindleError, UnexpectedError, UsageError
from rekindle.job import lifeline
from rekindle.job.journal_file import JournalFile
from rekindle.job.spec import Endpoint, JobDirectory
from rekindle.protocol.agent import decode_from_agent, encode
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.dialect import Dialect
from rekindle.silence import GAP_S, MOST_GRACE_S
from rekindle.supervised import supervised
from rekindle.writer import take_streams

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

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


def load_tables(user_file: str, dialect: Dialect) -> Tables:
    """Return the tables of faults for a policy's dialect. Only the first call reads them.

    Other calls wait for it.

    The coordinator makes this call before it needs the tables, if there is time.
    Raises UsageError: the user's file cannot be used.
    """
    # msgspec 0.22 can crash if two threads decode a class for the first time at the same time.
    with _loading:
        return _read_tables(user_file, dialect)


@functools.cache
def _read_tables(user_file: str, dialect: Dialect) -> Tables:
    from rekindle.recovery.faults.tables.tables import Tables

    return Tables.load(Path(user_file) if user_file else None, dialect)


class Coordinator:
    """One attempt of a job."""

    def __init__(self, directory: JobDirectory, attempt: int) -> None:
        self.directory = directory
        self.spec = directory.spec()
        journal_file = JournalFile(directory.journal_file)
        past = journal_file.known
        self.event_log = EventLog(journal_file, self._carry_out_waiting)
        self.tables = functools.partial(
            load_tables, self.spec.fault_tables, self.spec.policy.dialect
        )
        self.machine = Machine(self.spec, self.tables, attempt=attempt, earlier=earlier(past))
        self._inherited = inheritance(past, attempt)
        self.ended = asyncio.Event()
        self.inputs = Inputs(directory.path, self.machine.job, self.carry_out, self.ended.set)
        self.http_api = HttpApi(self.machine, self.event_log, self.inputs)
        self.succeeded = False
        self._agent_connections: dict[int, AgentConnection] = {}
        self._connection_numbers = itertools.count(1)
        self._timers: dict[state.Timer, asyncio.TimerHandle] = {}
        self._timer_orders: Counter[state.Timer] = Counter()  # commands about each timer
        # Each order waits until the event with this number is recorded.
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    # ---- carrying out

    def carry_out(self) -> None:
        """Carry out all commands of the machine.

        An error of the encoding comes before the first command has an effect. An order waits until
        the events before it are recorded. A takeover then knows the cause of each order that an
        agent has. A timer starts in the order of the orders, because it limits what they demand.
        Pings do not wait.
        """
        commands = self.machine.job.drain()
        # A message to all agents is one object.
        messages = {id(sent.message): sent.message for sent in commands if type(sent) is state.Send}
        encoded = {key: encode(message) for key, message in messages.items()}
        for command in commands:
            match command:
                case state.Record(event):
                    self.event_log.append(event)
                case state.SetTimer(timer, seconds):
                    self._cancel_timer(timer)
                    number = self._timer_orders[timer]
                    self._when_recorded(self._start_timer, timer, seconds, number)
                case state.CancelTimer(timer):
                    self._cancel_timer(timer)
                case state.Send(connection, message):
                    self._when_recorded(self._tell, connection, encoded[id(message)])
                case state.End(succeeded):
                    self._when_recorded(self._end, succeeded)
        self._carry_out_waiting()

    def _when_recorded(self, order: Callable[..., None], *arguments: object) -> None:
        order = functools.partial(order, *arguments)
        self._waiting.append((len(self.event_log.events), order))

    def _carry_out_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.event_log.recorded:
            self._waiting.popleft()[1]()

    def _tell(self, connection: int, message: bytes) -> None:
        if connection in self._agent_connections:
            self._agent_connections[connection].tell(message)

    def _end(self, succeeded: bool) -> None:
        self.succeeded = succeeded
        self.ended.set()

    def _start_timer(self, timer: state.Timer, seconds: float, number: int) -> None:
        """Start a timer, unless a later command about it has come since."""
        if self._timer_orders[timer] == number:
            self._set_timer(timer, seconds)

    def _set_timer(self, timer: state.Timer, seconds: float, *, again: bool = False) -> None:
        self._cancel_timer(timer)
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        expired = self._on_timer if again else functools.partial(self._on_first, seconds, due)
        self._timers[timer] = loop.call_at(due, expired, timer)

    def _cancel_timer(self, timer: state.Timer) -> None:
        self._timer_orders[timer] += 1
        running = self._timers.pop(timer, None)
        if running is not None:
            running.cancel()

    def _on_first(self, seconds: float, due: float, timer: state.Timer) -> None:
        """Handle a time limit. If this process has just been stopped, set the limit again first.

        Messages of processes that kept the limit may wait to be read, and processes that were
        stopped as well may continue later.
        """
        if asyncio.get_running_loop().time() - due > GAP_S:
            self._set_timer(timer, min(seconds, MOST_GRACE_S), again=True)
        else:
            self._on_timer(timer)

    def _on_timer(self, timer: state.Timer) -> None:
        self.inputs.give("timer", timer, lambda: self.machine.on_timer(timer, time.time()))

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the job."""
        stop = functools.partial(self.machine.endings.stop, reason, at_once=at_once)
        self.inputs.give("stop", reason, stop)

    # ---- agents

    async def agent(self, request: web.Request) -> web.StreamResponse:
        """Serve one agent's connection until it ends.

        Refuse an agent of another wire version, and one that does not send its version.
        """
        version = request.headers.get(names.HEADER_WIRE, "unknown")
        if version != str(names.WIRE_VERSION):
            text = (
                f"the coordinator refused the agent at {request.remote}, because its wire "
                f"version is {version[:20]!r}"
            )
            say(text)
            ours = {names.HEADER_WIRE: str(names.WIRE_VERSION)}
            return web.Response(status=HTTPStatus.UPGRADE_REQUIRED, headers=ours)
        socket = web.WebSocketResponse(autoping=False, max_msg_size=16 << 20)
        await socket.prepare(request)
        connection = next(self._connection_numbers)
        agent_connection = self._agent_connections[connection] = AgentConnection(
            socket, request.transport
        )
        try:
            async with supervised(sender=agent_connection.send_all()):
                await self._listen(socket, connection)
        except Exception as error:  # aiohttp would continue after it
            self.inputs.fail(error)
        finally:
            del self._agent_connections[connection]
            lost = functools.partial(self.machine.losses.on_agent_lost, connection, time.time())
            self.inputs.give("loss", "the connection of an agent ended", lost, connection)
        return socket

    async def _listen(self, socket: web.WebSocketResponse, connection: int) -> None:
        """Read the connection until it ends. After a bug its messages have no effect."""
        agent_connection = self._agent_connections[connection]
        async for frame in socket:
            agent_connection.note_message()
            if frame.type is WSMsgType.PONG:
                continue
            if frame.type is WSMsgType.PING:
                ends = self.machine.job.phase in state.ENDING
                agent_connection.answer(names.ENDING if ends else frame.data)
                continue
            try:
                if frame.type is not WSMsgType.BINARY:
                    raise ProtocolError(
                        f"an agent sent a frame of type {frame.type.name} instead of a binary frame"
                    )
                message = decode_from_agent(frame.data)
                handle = functools.partial(
                    self.machine.on_message, connection, message, time.time()
                )
                self.inputs.message(connection, message, handle)
            except ProtocolError as error:
                say(f"the coordinator closed the connection of an agent: {error}")
                await socket.close(code=1008, message=str(error).encode()[:120])
                return

    async def report_progress(self) -> None:
        """Send the steps of the ranks to followers whenever they change."""
        last: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(PROGRESS_S)
            machine = self.machine
            finished = min(rank.finished for rank in machine.job.roster.world)
            if last != (finished, machine.job.newest):
                last = (finished, machine.job.newest)
                self.event_log.publish(
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
        """Serve until the job is over. Return the exit status.

        Raises UnexpectedError: a bug has ended this coordinator, and the job needs another one.
        """
        app = application(self.directory)
        app.router.add_get(names.PATH_AGENT, self.agent)
        self.http_api.serve(app.router)
        # aiohttp cancels a handler when its client disconnects, so a lease ends with its holder.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        try:
            async with supervised(
                progress=self.report_progress(),
                connection_watch=watch(self._agent_connections),
                fault_tables=self._load_tables(),
            ):
                await self._open(runner, listener)
                async with self._metrics():
                    await self.ended.wait()
                    await self._see_agents_off()
        except UnexpectedError as error:
            self.inputs.fail(error)
        for connection in self._agent_connections.values():
            connection.cut()
        await self.event_log.close()
        await runner.cleanup()
        if self.inputs.bug is not None:
            raise self.inputs.bug
        return 0 if self.succeeded else 1

    def _metrics(self) -> AbstractAsyncContextManager[None]:
        """Return a context that serves the metrics, if there is an address for them."""
        listen = os.environ.get(names.ENV_METRICS_LISTEN, "")
        if not listen:
            return contextlib.nullcontext()
        from rekindle.coordinator.metrics import JobMetrics, metrics_served

        return metrics_served(listen, JobMetrics(self.machine, self.event_log.events))

    async def _open(self, runner: web.AppRunner, listener: socket.socket) -> None:
        """Accept connections, and start the machine."""
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        self._announce(listener)
        start = functools.partial(self.machine.takeover.start, self._inherited)
        self.inputs.give("start", self._inherited is not None, start)

    async def _load_tables(self) -> None:
        """Read the tables of faults before the machine needs them. It reads a bad one again."""
        await asyncio.sleep(TABLES_AFTER_S)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.tables)
        except UsageError as error:
            say(str(error), logging.ERROR)

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
            self.event_log.append(started)
        host, port = listener.getsockname()[:2]
        endpoint = Endpoint(
            host=names.LOOPBACK if host == "0.0.0.0" else host,
            port=port,
            pid=os.getpid(),
            attempt=self.machine.job.attempt,
        )
        try:
            self.directory.announce(endpoint)
        except OSError as error:  # the launcher has written the address
            say(f"the coordinator cannot write its address: {error}", logging.ERROR)

    async def _see_agents_off(self) -> None:
        deadline = time.monotonic() + FAREWELL_S
        while self._agent_connections and self.inputs.bug is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def allow_files(needed: int) -> None:
    """Raise the limit of open files to the hard limit, because a soft limit is often 1024.

    Print a warning if the hard limit is less than `needed`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"the limit is {hard} open files, but this job may need {needed}; raise ulimit -Hn"
        say(text)


def take_orders_of_launcher(coordinator: Coordinator, lifeline_fd: int) -> None:
    """Stop the job at SIGTERM or SIGINT, and when the launcher ends; end it at a later SIGINT.

    A scheduler sends SIGTERM to all processes of a job, and the launcher passes its own on. So a
    further SIGTERM has no effect.
    """
    loop = asyncio.get_running_loop()
    stopped: list[str] = []

    def stop(reason: str, *, repeated: bool = False) -> None:
        if repeated or not stopped:
            coordinator.stop(reason, at_once=bool(stopped))
        stopped.append(reason)

    loop.add_signal_handler(signal.SIGTERM, stop, "stopped by SIGTERM")
    interrupted = functools.partial(stop, "stopped by SIGINT", repeated=True)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    for number in lifeline.PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # it is for the ranks
    lifeline.watch(lifeline_fd, lambda: stop("the process that launched the job has ended"))


async def serve(options: argparse.Namespace) -> int:
    """Run the coordinator until the job is over or a signal stops it."""
    coordinator = Coordinator(JobDirectory(options.directory), options.attempt)
    allow_files(coordinator.spec.nodes + coordinator.spec.spares + OTHER_FILES)
    take_orders_of_launcher(coordinator, options.lifeline_fd)
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
    start(Process.COORDINATOR)
    take_streams()
    tune_memory()
    try:
        status = asyncio.run(serve(options))
    except UnexpectedError as error:  # `Inputs` has written a line about it
        status = error.exit_status
    except RekindleError as error:
        say(str(error), logging.ERROR)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
