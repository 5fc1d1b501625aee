"""Simulate many agents in one process, each with one rank and its own connection.

The coordinator sees them as agents: websockets, the job's secret, the messages of
`rekindle.protocol.agent`, heartbeats at the interval of real agents. There are no processes of
ranks: a simulated rank arrives, has its state and ends its step immediately at the coordinator's
request. The websocket client is minimal, so that the coordinator has most of the cores.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import itertools
import os
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from rekindle import names
from rekindle.agent.coordinator_connection import PING_S
from rekindle.coordinator.process import tune_memory
from rekindle.job.spec import bearer
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Exit, FaultKind

HOST = "node-0"  # the host of all simulated agents
AT_ONCE = 64  # connections that one process opens concurrently
TICK_S = 0.01
REPLACED_S = 0.05  # from the loss of an agent to the hello of its replacement
_BINARY, _CLOSE, _PING = 2, 8, 9


def address_of(node: int, life: int = 0) -> str:
    """Return the address that a node's agent reports; no process connects to it.

    life: the number of earlier agents of the node.
    """
    return f"10.{life}.{node >> 8}.{node & 255}"


@dataclass(frozen=True)
class Place:
    """The agents that one process simulates, and their job. beat_s: seconds between heartbeats."""

    nodes: range
    port: int
    secret: str
    job_id: str
    source: str
    beat_s: float


@dataclass
class Tally:
    """The times that the agents of one process saw in one regroup, by the monotonic clock."""

    fault: float = 0.0
    told: list[float] = field(default_factory=list)
    arrived: float = 0.0
    formed: list[float] = field(default_factory=list)


def simulate(place: Place, driver: Connection) -> None:
    """Run the agents of `place` until the driver ends them or closes the pipe."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tune_memory()  # as the coordinator does: the agents leave it the cores
    gc.disable()  # garbage collection would only search the agents' live objects
    asyncio.run(_Fleet(place, driver).run())


class Line(asyncio.Protocol):
    """The client's side of one websocket. The frames' mask is zero, which leaves data unchanged."""

    def __init__(self, agent: _Agent, head: bytes) -> None:
        self._agent = agent
        self._head = head
        self._left = b""
        self._transport: asyncio.Transport | None = None
        self.is_open = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request the upgrade to a websocket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._head)

    def connection_lost(self, error: Exception | None) -> None:
        """Notify the agent, unless it has cut the connection itself."""
        if not self.is_open.done():
            self.is_open.set_exception(error or ConnectionError("the line was refused"))
        self._agent.lost(self)

    def data_received(self, data: bytes) -> None:
        """Process the answer to the upgrade, then frames."""
        data = self._left + data
        at = 0
        if not self.is_open.done():
            head, found, _ = data.partition(b"\r\n\r\n")
            if not found:
                self._left = data
                return
            if b" 101 " not in head.split(b"\r\n", 1)[0]:
                self.is_open.set_exception(ConnectionError(head.decode(errors="replace")))
                return
            self.is_open.set_result(None)
            at = len(head) + 4
        self._left = data[self._frames(data, at) :]

    def _frames(self, data: bytes, at: int) -> int:
        """Process complete frames; return the start of the first incomplete one."""
        while len(data) - at >= 2:
            kind, size, begin = data[at] & 15, data[at + 1], at + 2
            if size >= 126:
                width = 2 if size == 126 else 8
                begin += width
                size = int.from_bytes(data[begin - width : begin], "big")
            if len(data) < begin + size:
                break
            at = begin + size
            if kind == _BINARY:
                self._agent.hear(p.decode_to_agent(data[begin:at]))
            elif kind == _PING:
                self._write(0x8A, data[begin:at])
            elif kind == _CLOSE:
                self.cut()
        return at

    def say(self, message: p.Message) -> None:
        """Send a message."""
        self._write(0x82, p.encode(message))

    def ping(self) -> None:
        """Check whether the coordinator's machine is alive, as agents do."""
        self._write(0x89, b"")

    def _write(self, kind: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            head = struct.pack("!BB", kind, 128 + size)
        else:
            head = struct.pack("!BBH", kind, 128 + 126, size)
        if self._transport is not None:
            self._transport.write(head + bytes(4) + payload)

    def cut(self) -> None:
        """Abort the connection, as the kernel does when a process has ended."""
        if self._transport is not None:
            self._transport.abort()


class _Agent:
    """One agent and its rank; pid 0: the rank has no process."""

    def __init__(self, fleet: _Fleet, node: int) -> None:
        self.node = node
        self.life = 0
        self.pid = 0
        self.finished: int | None = None
        self.line: Line | None = None
        self._fleet = fleet
        self._generation = 0

    def connected(self, line: Line, place: Place) -> None:
        """Send the agent's hello."""
        self.line = line
        hello = p.Hello(
            job_id=place.job_id,
            attempt=0,
            version=names.WIRE_VERSION,
            node=self.node,
            address=address_of(self.node, self.life),
            pid=os.getpid(),
            processes=1,
            host=HOST,
        )
        line.say(hello)

    def say(self, message: p.Message) -> None:
        if self.line is not None:
            self.line.say(message)

    def hear(self, message: p.Message) -> None:
        """Carry out the coordinator's message, as an agent and its rank would."""
        tally = self._fleet.tally
        match message:
            case p.GenerationEnded():
                tally.told.append(time.monotonic())
                if self.pid:
                    self.arrive()
            case p.FormGeneration():
                tally.formed.append(time.monotonic())
                self._generation = message.generation
                self.finished = message.step
                ready = p.StateReady(
                    rank=self.node, generation=message.generation, finished=message.step
                )
                self.say(ready)
                self._fleet.formed()
            case p.Spawn():
                self.pid, self.finished = self._fleet.new_pid(), None
                live = (p.LiveRank(rank=self.node, pid=self.pid),)
                self.say(p.Spawned(ranks=live, generation=message.generation))
                self.arrive()
            case p.HostStore():
                self.say(p.StoreUp(serial=message.serial, port=29500))
            case p.Kill():
                self.exit(15)
            case p.EndAgent(refused=reason) if reason:
                self._fleet.tell("trouble", f"agent {self.node} was refused: {reason}")
            case p.EndAgent():
                self.cut()

    def arrive(self) -> None:
        """Report that the rank waits for a generation with its state."""
        arrived = p.Arrived(rank=self.node, generation=self._generation, finished=self.finished)
        self.say(arrived)
        self._fleet.tally.arrived = time.monotonic()

    def exit(self, signal: int) -> None:
        """Report that the rank's process was killed."""
        pid, self.pid = self.pid, 0
        finished = self.finished or 0
        self.say(p.Exited(rank=self.node, pid=pid, exit=Exit(signal=signal), finished=finished))

    def fail_step(self) -> None:
        """Report that the rank's collective failed, as it may at every peer of a lost rank."""
        failed = p.StepFailed(
            rank=self.node,
            generation=self._generation,
            kind=FaultKind.LINK,
            error="Connection closed by peer",
            finished=self.finished or 0,
        )
        self.say(failed)

    def step(self) -> None:
        """Report that the rank has finished its first step of the generation."""
        self.finished = (self.finished or 0) + 1
        self.say(p.StepDone(rank=self.node, generation=self._generation, finished=self.finished))

    def beat(self) -> None:
        """Send the rank's heartbeat, if it has a process."""
        if self.pid:
            finished = {self.node: self.finished or 0}
            self.say(p.Heartbeat(finished=finished, total=1_000_000, metrics={"loss": 1.0}))

    def ping(self) -> None:
        if self.line is not None:
            self.line.ping()

    def cut(self) -> None:
        """End the agent, and its rank with it."""
        line, self.line, self.pid = self.line, None, 0
        if line is not None:
            line.cut()

    def lost(self, line: Line) -> None:
        """Report a connection that the coordinator has ended; the agent's own cuts are ignored."""
        if line is self.line:
            self.line = None
            self._fleet.tell("trouble", f"the line of agent {self.node} was cut")


class _Fleet:
    """All agents of the process, and the driver's orders for them."""

    def __init__(self, place: Place, driver: Connection) -> None:
        self._place = place
        self._driver = driver
        self._agents = {node: _Agent(self, node) for node in place.nodes}
        self._pids = itertools.count(1000)
        self._doors = asyncio.Semaphore(AT_ONCE)
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.tally = Tally()

    async def run(self) -> None:
        """Connect all agents to the coordinator, and carry out the driver's orders."""
        asyncio.get_running_loop().add_reader(self._driver.fileno(), self._handle_orders)
        await asyncio.gather(*map(self._connect, self._agents.values()))
        self.tell("connected", len(self._agents))
        beats = asyncio.create_task(self._each(self._place.beat_s, _Agent.beat))
        pings = asyncio.create_task(self._each(PING_S, _Agent.ping))
        await self._ended.wait()
        beats.cancel()
        pings.cancel()

    async def _connect(self, agent: _Agent) -> None:
        place, key = self._place, base64.b64encode(os.urandom(16)).decode()
        head = (
            f"GET {names.PATH_AGENT} HTTP/1.1\r\nHost: {names.LOOPBACK}:{place.port}\r\n"
            f"Authorization: {bearer(place.secret)}\r\n"
            f"{names.HEADER_WIRE}: {names.WIRE_VERSION}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        async with self._doors:
            _, line = await asyncio.get_running_loop().create_connection(
                lambda: Line(agent, head),
                names.LOOPBACK,
                place.port,
                local_addr=(place.source, 0),
            )
            await line.is_open
        agent.connected(line, place)

    async def _each(self, interval_s: float, do: Callable[[_Agent], None]) -> None:
        """Call `do` with every agent once per interval, evenly over the interval."""
        agents = itertools.cycle(self._agents.values())
        begin, done = time.monotonic(), 0
        while True:
            await asyncio.sleep(TICK_S)
            due = int((time.monotonic() - begin) / interval_s * len(self._agents))
            for agent in itertools.islice(agents, due - done):
                do(agent)
            done = due

    # ---- the driver

    def tell(self, what: str, value: object) -> None:
        """Send a message to the driver."""
        with contextlib.suppress(OSError):
            self._driver.send((what, value))

    def _handle_orders(self) -> None:
        try:
            order, node = self._driver.recv()
        except EOFError:
            order, node = "end", 0
        match order:
            case "step":
                for agent in self._agents.values():
                    agent.step()
                self.tell("stepped", len(self._agents))
            case "kill":
                self.tally.fault = time.monotonic()
                self._agents[node].exit(9)
            case "fail":
                for agent in self._agents.values():
                    if agent.pid:
                        agent.fail_step()
            case "cut":
                self.tally.fault = time.monotonic()
                self._agents[node].cut()
                task = asyncio.create_task(self._replace(self._agents[node]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "end":
                asyncio.get_running_loop().remove_reader(self._driver.fileno())
                self._ended.set()

    async def _replace(self, agent: _Agent) -> None:
        await asyncio.sleep(REPLACED_S)
        agent.life += 1
        await self._connect(agent)

    def formed(self) -> None:
        """Record that an agent has its Form; report the regroup after the last one."""
        if len(self.tally.formed) == len(self._agents):
            self.tell("ready", self.tally)
            self.tally = Tally()

    def new_pid(self) -> int:
        """Return a number for a process that does not exist."""
        return next(self._pids)
