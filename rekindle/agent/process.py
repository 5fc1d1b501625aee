"""The agent: one process per node that starts, watches and ends the node's ranks.

It carries out the coordinator's orders and reports what it observes; it decides nothing. If the
coordinator dies, the agent keeps its ranks and waits for another coordinator. If the agent dies,
all its ranks end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rekindle import names
from rekindle.agent.checkers import NodeCheckRunner
from rekindle.agent.coordinator_connection import (
    CONNECT_S,
    CoordinatorSilence,
    Link,
    Outbox,
    abandon,
    connect,
    decline,
    open_session,
)
from rekindle.agent.departure import Departure
from rekindle.agent.devices import tools as device_tools
from rekindle.agent.devices.tools import DeviceMonitor, read_condition
from rekindle.agent.fork_server import agent_environment
from rekindle.agent.leftovers import end_descendants
from rekindle.agent.node_state import NodeState
from rekindle.agent.profiling_files import ProfilingFiles, ProfilingReader
from rekindle.agent.rank_process import names_session
from rekindle.agent.ranks import RankSupervisor
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.agent.threads import in_thread
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import CheckpointStore, foreign
from rekindle.console import Process, at_node, say, start
from rekindle.errors import (
    CheckpointError,
    JobError,
    RekindleError,
    UnexpectedError,
    UsageError,
)
from rekindle.job import lifeline
from rekindle.job.spec import EntryKind, JobDirectory, JobSpec
from rekindle.profiling.files import records_folder
from rekindle.profiling.switch import limits_in
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import beat_interval
from rekindle.states import StateId
from rekindle.supervised import stack_of, supervised, write_report
from rekindle.writer import flush, take_streams

_PR_SET_CHILD_SUBREAPER = 36

Orders = asyncio.Queue[tuple[int, protocol.Message]]  # with the number of the connection


class Agent:
    """The agent of one node in one attempt."""

    def __init__(
        self,
        directory: JobDirectory,
        spec: JobSpec,
        store: CheckpointStore,
        secret: str,
        hello: protocol.Hello,
        simulated_host: Path | None = None,
    ) -> None:
        self.spec = spec
        self._secret = secret
        self._directory = directory
        self._hello = hello
        self.status = 1
        self._hurried = False  # the agent does not wait for a checkpoint that it is writing
        self._link = Link()
        self._outbox = Outbox()
        self.send = self._outbox.put
        self._connection_count = 0  # connections to coordinators, so far
        self._last_beat: tuple[int, protocol.Heartbeat] | None = None  # with its generation
        self._handling = asyncio.Lock()
        self._store = store
        credentials = Credentials(spec.job_id, hello.attempt, secret)
        self._replica_server = ReplicaServer(spec, credentials, self.send)
        self._snapshots = NodeSnapshots(
            spec,
            store,
            self.send,
            replica_server=self._replica_server,
            replica_client=ReplicaClient(credentials),
        )
        simulated = simulated_host is not None
        environment = agent_environment(os.environ, spec, hello.address, simulated=simulated)
        self.state = NodeState(spec.processes_per_node, host=simulated_host)
        records = records_folder(environment, Path(spec.directory, names.PROFILING_DIRECTORY))
        reader = ProfilingReader(records, environment, self.state, spec.world_size)
        cap = limits_in(environment, say).cap_bytes
        own = lambda: self.state.ranks  # noqa: E731
        self._profiling_files = ProfilingFiles(records, own, self.send, reader.read, cap_bytes=cap)
        self.ranks = RankSupervisor(
            spec,
            self._snapshots,
            self.send,
            environment,
            self.state,
            reader.positions,
        )
        fork, streams = self.ranks.fork, self.ranks.helper_streams
        self._checkers = NodeCheckRunner(spec, fork, self.send, environment, streams)
        self._task: asyncio.Task[Any] | None = None  # the one that serves the job
        self.departure = Departure(
            self.ranks,
            self._snapshots,
            link=self._link,
            end=self._leave,
            write_limit_s=spec.policy.dump_timeout_s,
        )

    async def run(self, url: str) -> int:
        """Serve the job until its coordinator sends EndAgent; return the exit status.

        After the death of a coordinator the agent waits for another one, and the ranks
        continue.
        """
        self._task = asyncio.current_task()
        of_python = self.spec.entry is not EntryKind.PROGRAM
        self.ranks.start_fork_server(self.spec.framework if of_python else None)
        if self._hello.spare:
            self.ranks.warm_up()
        port = self._replica_server.listen(self._hello.address)
        self._hello = msgspec.structs.replace(self._hello, replica_port=port)
        orders: Orders = asyncio.Queue()
        try:
            async with supervised(orders=self._handle_orders(orders)):
                await self._learn()  # while the fork server imports
                async with supervised(
                    heartbeat=self._beat(),
                    watchdog=self.ranks.watchdog.watch(),
                    stopped_processes=self.ranks.stopped.watch(),
                    profiling_files=self._profiling_files.run(),
                    device_monitor=DeviceMonitor(self.ranks.devices, self.send).run(),
                ):
                    return await self._serve_coordinators(url, orders)
        finally:
            await self._end()

    async def _serve_coordinators(self, url: str, orders: Orders) -> int:
        limit_s = CONNECT_S
        async with open_session(self._secret) as session:
            while True:
                connection = await connect(session, url, self._directory, limit_s)
                self._link.connection = connection
                if await self._serve(connection, orders):
                    return self.status
                say("the agent lost its connection to the coordinator, and connects again")
                limit_s = self.spec.policy.coordinator_timeout_s

    async def _serve(
        self,
        connection: aiohttp.ClientWebSocketResponse[bool],
        orders: Orders,
    ) -> bool:
        """Serve one coordinator; False: the connection was cut."""
        self._connection_count += 1  # orders of an earlier coordinator do not start now
        async with self._handling:
            await self._checkers.end()
            unsent = self._sort_outbox()
            described = protocol.encode(self.ranks.describe(self._hello, unsent))
        with contextlib.suppress(ConnectionError):
            await connection.send_bytes(described)
        silence = CoordinatorSilence(connection)
        async with supervised(sender=self._outbox.send_all(connection)):
            listening = asyncio.ensure_future(self._listen(connection, orders, silence))
            silent = asyncio.ensure_future(silence.last())
            try:
                await asyncio.wait((listening, silent), return_when=asyncio.FIRST_COMPLETED)
                if listening.done():
                    return listening.result()
                silent.result()
            finally:
                listening.cancel()
                silent.cancel()
        say("the agent closed its connection, because the coordinator sent nothing for 30 s")
        await abandon(connection)
        return False

    def _sort_outbox(self) -> list[protocol.Exited]:
        """Keep messages that a new coordinator needs, and drop those for the old one only."""
        self._last_beat = None  # the new coordinator does not have it
        self.ranks.begin_beats()
        kept = self._outbox.keep_lasting()
        for message in self.ranks.waiting:
            self.send(message)
        return [message for message in kept if isinstance(message, protocol.Exited)]

    async def _learn(self) -> None:
        """Find the checkpoints from which this node could restore.

        If the agent cannot read the store, or finds another job's checkpoints, its Hello has the
        reason, and the coordinator ends it.
        """
        try:
            found = await in_thread(self._store.newest)
            for skipped in found.passed_over:
                self.send(protocol.CheckpointInvalid(path=skipped.location, reason=skipped.reason))
            if found.checkpoint is not None:
                newest = found.checkpoint.manifest
                if reason := foreign(self.spec.checkpoint_store, newest, self.spec.job_id):
                    raise CheckpointError(reason)
                at_most = newest.state
                self._offer(await in_thread(functools.partial(self._store.keys, at_most=at_most)))
        except CheckpointError as error:
            self._hello = _unable(self._hello, error)

    def _offer(self, checkpoints: list[StateId]) -> None:
        offers = tuple(checkpoints[: names.OFFERS])
        self._hello = msgspec.structs.replace(self._hello, checkpoints=offers)

    async def _listen(
        self,
        connection: aiohttp.ClientWebSocketResponse[bool],
        orders: Orders,
        silence: CoordinatorSilence,
    ) -> bool:
        """Read the connection until EndAgent (True) or until it is cut (False).

        Orders wait for each other, but the connection does not wait for them. It must answer the
        coordinator's pings, or the coordinator declares the node lost.
        Raises JobError: the coordinator refused this agent, or a message of it.
        """
        with contextlib.suppress(ConnectionError):  # the connection was cut during a pong
            async for frame in connection:
                silence.note_message()
                if frame.type is aiohttp.WSMsgType.PING:
                    await connection.pong(frame.data)
                    continue
                if frame.type is aiohttp.WSMsgType.PONG:
                    self._link.note_answer(frame.data)
                    continue
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                message = protocol.decode_to_agent(frame.data)
                match message:
                    case protocol.EndAgent(refused=reason) if reason:
                        raise JobError(f"the coordinator refused this agent: {reason}")
                    case protocol.EndAgent(status=status):
                        self.status, self._hurried = status, message.at_once
                        return True
                    case protocol.Welcome(node=names.SPARE) if self._hello.prepared:
                        pass  # its ranks still belong to the node that it prepares
                    case protocol.Welcome(node=node):
                        self.state.node = node
                        self._be(node)
                    case _:
                        orders.put_nowait((self._connection_count, message))
        if connection.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
            raise JobError(
                "the coordinator rejected a message of this agent as invalid for this job"
            )
        return False

    async def _handle_orders(self, orders: Orders) -> None:
        while True:
            number, message = await orders.get()
            async with self._handling:
                if number != self._connection_count:
                    continue
                if isinstance(message, protocol.Promote):
                    await self._take_place(message.node)
                elif isinstance(message, protocol.Prepare):
                    await self._prepare(message)
                elif isinstance(message, protocol.CheckOrder):
                    await self._checkers.handle(message)
                else:
                    await self.ranks.handle(message)

    async def _take_place(self, node: int) -> None:
        """Become this node; a repeated order has no effect."""
        if self._hello.node != names.SPARE:
            return
        prepared = self._hello.prepared
        self._be(node)
        if prepared:  # the others wait for it
            self.send(self.ranks.describe(self._hello, []))
            for arrived in self.ranks.waiting:
                self.send(arrived)
            return
        # Many checkpoints are new since this agent started. The rank that loads one verifies it.
        self._offer(await in_thread(self._store.keys))
        self.send(self._hello)

    async def _prepare(self, order: protocol.Prepare) -> None:
        """Start the ranks of a node that still has another agent, and remain a spare."""
        self.state.node = order.node
        self._hello = msgspec.structs.replace(self._hello, prepared=True)
        self._offer(await in_thread(self._store.keys))
        await self.ranks.handle(order.spawn)

    def _be(self, node: int) -> None:
        """Use this node rank, or the role of a spare, in each later Hello."""
        at_node(node)
        spare = self._hello.spare or node == names.SPARE
        self._hello = msgspec.structs.replace(self._hello, node=node, spare=spare, prepared=False)

    async def _beat(self) -> None:
        """Send a heartbeat when the progress changes, and the first one of each generation.

        The generation may begin at an earlier step. A new connection also gets one.
        """
        interval_s = beat_interval(self.spec.nodes)
        while True:
            await asyncio.sleep(interval_s)
            beat = self.ranks.beat()
            new = self.state.generation, beat
            if beat != protocol.Heartbeat(finished={}) and new != self._last_beat:
                self._last_beat = new
                self.send(beat)

    def _leave(self, at_once: bool) -> None:
        self._hurried |= at_once
        assert self._task is not None
        self._task.cancel()

    async def _end(self) -> None:
        """End everything of this agent: ranks, their helpers, fork server, store, memory."""
        self.departure.begin_end()
        if self.departure.is_alone:
            with contextlib.suppress(asyncio.CancelledError):  # a second demand ends it at once
                self._hurried |= not await self.departure.end_alone()
        await self._checkers.end()
        await self.ranks.end()
        if not self._hurried:
            self._hurried = not await self._snapshots.close()
            await self._replica_server.close()
        await self._link.close()
        await in_thread(end_descendants)
        if self._hurried:
            flush()
            os._exit(self.status)  # only this ends the process while a thread still writes


def _unable(hello: protocol.Hello, error: RekindleError) -> protocol.Hello:
    say(str(error), logging.ERROR)
    return msgspec.structs.replace(hello, unable=str(error))


def _host_name() -> str:
    """Return the name of this machine for users; a pod receives it in a variable."""
    return os.environ.get(names.ENV_HOST_NAME) or socket.gethostname()


async def serve(options: argparse.Namespace) -> int:
    """Run one agent until its job is over; return its exit status."""
    simulated_host = options.simulated_host
    if simulated_host is not None and (await in_thread(read_condition, simulated_host)).broken:
        say(f"the simulated host {simulated_host.name} is faulty", logging.ERROR)
        return 1
    directory = JobDirectory(options.directory)
    spec = await in_thread(directory.spec)
    secret = os.environ.pop(names.ENV_SECRET, "") or await in_thread(directory.secret)
    hello = protocol.Hello(  # describes this agent
        job_id=spec.job_id,
        attempt=options.attempt,
        version=names.WIRE_VERSION,
        node=options.node,
        spare=options.spare,
        address=options.address,
        pid=os.getpid(),
        processes=spec.processes_per_node,
        host=simulated_host.name if simulated_host else _host_name(),
        devices=device_tools.are_there(),
        session=await in_thread(names_session, spec),
    )
    url = f"http://{options.coordinator}{names.PATH_AGENT}"
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    # Before it has ranks, an agent ends at once.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    lifeline.watch(options.lifeline_fd, task.cancel)
    try:
        try:
            environment = os.environ | spec.environment
            store = await in_thread(open_store, spec.checkpoint_store, environment)
        except UsageError as error:
            return await decline(url, directory, secret, _unable(hello, error))
        agent = Agent(directory, spec, store, secret, hello, simulated_host)
        loop.add_signal_handler(signal.SIGTERM, agent.departure.demand)
        loop.add_signal_handler(signal.SIGINT, agent.departure.demand_twice)
        for number in lifeline.PASSED_ON:
            loop.add_signal_handler(number, agent.departure.pass_on, number)
        lifeline.watch(options.lifeline_fd, agent.departure.demand)
        return await agent.run(url)
    except asyncio.CancelledError:
        return 1
    except UnexpectedError as error:
        say(f"the agent ends, because {error}\n{stack_of(error)}", logging.ERROR)
        try:
            await in_thread(write_report, Path(spec.directory), f"agent-{options.node}", error, [])
        except OSError as failed:
            say(f"the agent cannot write a report of the error: {failed}", logging.ERROR)
        return 1
    except RekindleError as error:
        say(str(error), logging.ERROR)
        return 1


def main() -> None:
    """Run the agent of one node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--node", type=int, default=-1)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--address", default=names.LOOPBACK)
    parser.add_argument("--simulated-host", type=Path)  # this process inherits it open and locked
    parser.add_argument("--lifeline-fd", type=int, default=-1)
    # Ranks are forked twice, and may leave helpers: this process becomes the parent of orphans.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    options = parser.parse_args()
    start(Process.AGENT, node=options.node)
    take_streams()
    sys.exit(asyncio.run(serve(options)))


if __name__ == "__main__":
    main()
