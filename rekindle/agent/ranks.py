"""The ranks of one node: this module carries out the coordinator's orders about them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rekindle import names
from rekindle.agent.devices.resets import DeviceResets
from rekindle.agent.fork_server import Child, ForkServers
from rekindle.agent.fork_server_process import ForkOrder, RunRank
from rekindle.agent.leftovers import end_helpers, marks_of
from rekindle.agent.node_state import NodeState
from rekindle.agent.output import Output, Stream
from rekindle.agent.rank_process import (
    HeartbeatPages,
    RankProcess,
    rank_environment,
    with_local_progress,
)
from rekindle.agent.rendezvous_process import StoreProcess, start_store, worker_environment
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.stopped_processes import StoppedProcesses
from rekindle.agent.threads import in_thread
from rekindle.agent.watchdog import Watchdog
from rekindle.console import say
from rekindle.errors import RekindleError
from rekindle.job.spec import Framework, JobSpec
from rekindle.profiling.blocked_collectives import CollectivePosition
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.recovery.faults.fault import Exit
from rekindle.supervised import in_background

# Signals of a person, of the job or of the kernel, which a rank's own output does not explain.
_UNEXPLAINED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RankSupervisor:
    """The node's ranks, their fork server and (on one node of the job) their store.

    positions: returns the position of each rank in its collectives.
    """

    def __init__(
        self,
        spec: JobSpec,
        snapshots: NodeSnapshots,
        send: Callable[[protocol.Message], None],
        environment: dict[str, str],
        state: NodeState,
        positions: Callable[[], Mapping[int, CollectivePosition]] = dict[int, CollectivePosition],
    ) -> None:
        self._state = state
        self._spec = spec
        self._snapshots = snapshots
        self._send = send
        self._resets = DeviceResets(spec, state, send)
        self._environment = environment
        self._starts: Counter[int] = Counter()  # of each rank
        self._marks: dict[int, frozenset[bytes]] = {}  # of each rank's newest process
        self._ranks: dict[int, RankProcess] = {}
        self._leaving: dict[int, int] = {}  # pids of ranks whose end is not reported yet
        self.watchdog = Watchdog(self._ranks, spec, send, state, positions)
        limit_s = spec.policy.hang_timeout_s
        self.stopped = StoppedProcesses(self._ranks, self.helpers, limit_s, send, state)
        self._pages = HeartbeatPages(spec.job_id)
        self._streams: dict[int, list[Stream]] = {}
        self._store: StoreProcess | None = None
        self._output = Output(spec)
        self.helper_streams = self._output.for_helpers
        self._fork_servers = ForkServers(environment, self._output.for_helpers)
        self._gone = asyncio.Event()
        self._training: set[int] = set()  # ranks that are in a Session
        self._ready: set[int] = set()  # ranks that have their generation's state
        self._waiting: dict[int, protocol.Arrived] = {}
        self._shards: dict[int, int] = {}  # the shards of ranks whose state is sharded
        self._ended: set[int] = set()  # ranks that ended with status 0
        self._helpers: dict[int, asyncio.Task[None]] = {}  # ends the helpers of an ended rank
        self.job_ends = False  # the coordinator ends the job
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders: dict[type[protocol.Message], Callable[[Any], object]] = {
            protocol.Kill: self._kill,
            protocol.StatesEqual: lambda order: self._pages.agreed(order.step),
            protocol.WriteFinalCheckpoint: self._write_final_checkpoint,
            protocol.WriteShards: snapshots.write_parts,
            protocol.Commit: snapshots.commit,
            protocol.InspectRanks: self._look,
            protocol.FormGeneration: self._form,
            protocol.Settings: self._set,
            protocol.GenerationEnded: self._over,
            protocol.Inject: self._tell_one,
            protocol.PauseRequest: self._tell_one,
            protocol.EndSession: self._dismiss,
        }
        self._from_ranks: dict[type[protocol.Message], Callable[[RankProcess, Any], None]] = {
            protocol.BufferRequest: self._on_snapshot_room,
            protocol.SnapshotTaken: lambda _, taken: snapshots.taken(taken),
            protocol.Arrived: self._on_arrived,
            protocol.StateReady: self._on_state_ready,
            protocol.StepDone: self._on_step_done,
        }

    def start_fork_server(self, preload: Framework | None) -> None:
        """Start the process that forks the ranks; its imports run while the agent connects."""
        self._fork_servers.begin(preload)

    def warm_up(self) -> None:
        """Fork a process before the first order to start a rank."""
        in_background(self._prepare(), self._tasks)

    async def handle(self, message: protocol.Message) -> None:
        """Carry out one order of the coordinator."""
        match message:
            case protocol.Spawn():
                await self._spawn(message)
            case protocol.HostStore():
                await self._host_store(message)
            case _:
                self._orders[type(message)](message)

    # ---- orders

    def _look(self, order: protocol.InspectRanks) -> None:
        in_background(self.watchdog.look(order), self._tasks)

    def _form(self, form: protocol.FormGeneration) -> None:
        state = self._state
        state.generation, state.profile = form.generation, form.settings.profile
        state.formed_ns = time.time_ns()
        self._waiting.clear()
        self._pages.agreed(form.step, at_most=True)
        self._snapshots.own.former = form.former
        if form.shards > 1 or form.suspicions:  # otherwise all snapshots stay as they are
            self._snapshots.formed(form)
        for number, rank in self._ranks.items():
            own = {"ranks": {number: form.ranks[number]}, "plan": {number: form.plan[number]}}
            rank.send(msgspec.structs.replace(form, **own, replica_addresses={}, former=None))

    def _set(self, order: protocol.Settings) -> None:
        self._state.profile = order.profile
        self._tell_all(order)

    def _over(self, over: protocol.GenerationEnded) -> None:
        if self._shards or self._snapshots.own.former is not None:  # transfers may be under way
            self._snapshots.break_off()
        self._tell_all(with_local_progress(over, self._pages.every))

    def _dismiss(self, order: protocol.EndSession) -> None:
        self._training.clear()
        self._waiting.clear()
        self._tell_all(order)

    def _tell_one(self, order: protocol.Inject | protocol.PauseRequest) -> None:
        if order.rank in self._ranks:
            self._ranks[order.rank].send(order)

    def _tell_all(self, message: protocol.Message) -> None:
        for rank in self._ranks.values():
            rank.send(message)

    def describe(self, hello: protocol.Hello, unsent: list[protocol.Exited]) -> protocol.Hello:
        """Add to `hello` the facts about running ranks that a new coordinator needs.

        unsent: ends of ranks that the agent reports next; for the coordinator these ranks still
        live.
        """
        pids = self._leaving | {rank.rank: rank.pid for rank in self._ranks.values()}
        pids |= {message.rank: message.pid for message in unsent}
        return msgspec.structs.replace(
            hello,
            node=self._state.node if pids or self._ended else hello.node,
            checkpoints=(*self._snapshots.checkpoints, *hello.checkpoints)[: names.OFFERS],
            snapshots=self._snapshots.kept,
            copies=self._snapshots.copies,
            shards=self._shards,
            generation=self._state.generation,
            restart=self._state.restart,
            ranks=tuple(
                protocol.LiveRank(rank=rank, pid=pid, training=rank in self._training)
                for rank, pid in sorted(pids.items())
            ),
            ended=tuple(sorted(self._ended - set(pids))),
            store=self._store.live(self._state.restart) if self._store is not None else None,
        )

    def devices(self) -> dict[int, int]:
        """Return the process on each device on which this node started a rank; 0: it has ended.

        For a simulated host this is empty, because the host's file has the state of its devices.
        """
        if self._state.host is not None:
            return {}
        live, count = self._ranks, self._spec.processes_per_node
        return {rank % count: live[rank].pid if rank in live else 0 for rank in self._starts}

    @property
    def waiting(self) -> list[protocol.Arrived]:
        """The arrivals that no coordinator has answered yet."""
        return list(self._waiting.values())

    # ---- starting

    async def _spawn(self, spawn: protocol.Spawn) -> None:
        live: list[protocol.LiveRank] = []
        self._state.restart = spawn.restart
        if self._store is not None and self._store.restart is None:
            self._store.restart = spawn.restart
        try:
            # No rank starts before the resets, because a reset may end other devices as well.
            broken = await self._resets.reset(spawn.reset)
            for number in (each for each in spawn.ranks if each not in broken):
                try:
                    process = await self._start(number, spawn)
                except (RekindleError, OSError) as error:
                    self._send(protocol.SpawnFailed(rank=number, error=str(error)))
                else:
                    live.append(protocol.LiveRank(rank=number, pid=process.pid))
        finally:  # also after a cancellation, the agent must see the end of each started rank
            if live:
                self._send(protocol.Spawned(ranks=tuple(live), generation=spawn.generation))
            for started in live:
                rank = self._ranks[started.rank]
                rank.watch(self._on_message, self._on_exit)

    async def _start(self, rank: int, spawn: protocol.Spawn) -> RankProcess:
        if rank in self._ended:  # otherwise they end with the rank
            await self._end_helpers(rank)
        if rank in self._helpers:
            await self._helpers.pop(rank)
        logs = await self._output.open(rank, spawn.restart)
        streams = self._output.streams(rank, logs)
        with contextlib.ExitStack() as closing:
            for stream in streams:
                closing.callback(stream.started)
            page_fd, page = self._pages.of(rank)
            page.new_life()
            request = self._request(rank, spawn, logs.directory)
            fds = [page_fd, *(stream.fd for stream in streams)]
            child = await self.fork(request, fds)
        process = RankProcess(rank, child, page, logs.directory)
        self._starts[rank] += 1
        self._marks[rank] = marks_of(request.environment)
        self._ranks[rank], self._streams[rank] = process, streams
        self._ended.discard(rank)
        return process

    def _request(self, rank: int, spawn: protocol.Spawn, logs: Path) -> RunRank:
        environment = self._environment | rank_environment(
            self._spec,
            spawn,
            rank=rank,
            starts=self._starts[rank] + 1,
            logs=logs,
            metrics_file=str(self._metrics_file(rank)),
        )
        if self._spec.framework is Framework.MINDSPORE:
            environment |= worker_environment(self._spec, spawn, rank, environment)
        return RunRank(
            kind=self._spec.entry.value,
            target=self._spec.target,
            arguments=self._spec.arguments,
            environment=environment,
            working_directory=self._spec.working_directory,
        )

    async def fork(self, request: ForkOrder, fds: list[int]) -> Child:
        """Fork a process that carries out the request."""
        return await self._fork_servers.fork(request, fds)

    def helpers(self) -> list[int]:
        """Return the pids of helper processes on which the start of ranks depends now."""
        found, store = self._fork_servers.asked, self._store
        doing = [rank.page.mark.doing for rank in self._ranks.values()]
        meet = RankActivity.MEETING in doing or not doing
        return [*found, store.pid] if store is not None and meet else found

    async def _prepare(self) -> None:
        """Fork a process in advance for the next rank that dies, while the ranks work."""
        with contextlib.suppress(RekindleError):  # the next fork of a rank reports it
            await self._fork_servers.keep_one_ready()

    def _metrics_file(self, rank: int) -> Path:
        return Path(self._spec.directory, names.METRICS_DIRECTORY, f"rank{rank}.jsonl")

    # ---- the store

    async def _host_store(self, order: protocol.HostStore) -> None:
        await self._end_store()
        self._store = await start_store(self._spec, order, self.fork, self._send, self._environment)

    async def _end_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.end()

    # ---- messages of ranks

    def _on_message(self, rank: RankProcess, message: protocol.Message) -> None:
        handle = self._from_ranks.get(type(message))
        if handle is not None:
            handle(rank, message)
        else:
            self._send(message)

    def _on_snapshot_room(self, rank: RankProcess, asked: protocol.BufferRequest) -> None:
        self._snapshots.room(asked, functools.partial(self._answer, rank))

    def _on_arrived(self, _: RankProcess, arrived: protocol.Arrived) -> None:
        self._training.add(arrived.rank)
        self._ready.discard(arrived.rank)
        self._waiting[arrived.rank] = arrived
        if arrived.shard is not None:
            self._shards[arrived.rank] = arrived.shard
        # The coordinator must know them before it decides from which state the rank continues.
        if digests := self._pages.new_digests(arrived.rank):
            self._send(protocol.Heartbeat(finished={}, digests={arrived.rank: digests}))
        self._send(arrived)

    def _on_state_ready(self, _: RankProcess, ready: protocol.StateReady) -> None:
        self._send(ready)
        if not ready.error:
            self._ready.add(ready.rank)

    def _on_step_done(self, _: RankProcess, done: protocol.StepDone) -> None:
        self._send(done)
        in_background(self._prepare(), self._tasks)

    def _answer(self, rank: RankProcess, answer: protocol.BufferGrant, fds: list[int]) -> None:
        """Answer a rank, unless it has ended since its request."""
        if self._ranks.get(rank.rank) is rank:
            rank.send(answer, fds)

    def _on_exit(self, rank: RankProcess, exit_: Exit) -> None:
        streams = self._streams.pop(rank.rank, [])
        for stream in streams:
            stream.drain()
        if self._ranks.get(rank.rank) is rank:
            del self._ranks[rank.rank]
        self._training.discard(rank.rank)
        self._ready.discard(rank.rank)
        self._waiting.pop(rank.rank, None)
        self._leaving[rank.rank] = rank.pid
        exited = protocol.Exited(
            rank=rank.rank,
            pid=rank.pid,
            exit=exit_,
            finished=rank.page.finished or 0,
            no_memory=self.watchdog.oom.killed_lately(time.monotonic()),
            at=time.time(),
            digests=self._pages.new_digests(rank.rank),
        )
        said = streams[-1].last_lines() if streams else ""
        in_background(self._report_end(rank, exited, said), self._tasks)
        if not self._ranks:
            self._gone.set()

    async def _report_end(self, rank: RankProcess, exited: protocol.Exited, said: str) -> None:
        """Report the end of a rank. said: the end of its standard error.

        If its status is 0, the agent first writes the rank's last checkpoint, because the job may
        end.
        """
        if exited.exit.code == 0:
            await self._snapshots.finish_in_time()
            self._ended.add(exited.rank)
        else:
            # The next process of the rank waits for it, and the report does not.
            self._helpers[rank.rank] = in_background(self._end_helpers(rank.rank), self._tasks)
            exited = msgspec.structs.replace(
                exited, error=await self._output.error_of(rank.rank, rank.error)
            )
            if exited.error is None and said and exited.exit.signal not in _UNEXPLAINED:
                say(f"rank {rank.rank} ended with {exited.exit}; the end of its stderr: {said}")
                exited = msgspec.structs.replace(exited, said=said)
        if self._leaving.get(exited.rank) == exited.pid:
            del self._leaving[exited.rank]
        self._send(exited)

    async def _end_helpers(self, rank: int) -> None:
        """End the helpers of a rank's last process, whose ports the next one may need."""
        left = await in_thread(end_helpers, self._marks[rank])
        if left:
            say(f"the processes {left} that rank {rank} started did not end after SIGKILL")

    def beat(self) -> protocol.Heartbeat:
        """Return the progress of the live ranks for the coordinator."""
        return self._pages.beat(self._ranks, self._ready)

    def begin_beats(self) -> None:
        """Note that another coordinator needs all digests of the ranks' states."""
        self._pages.send_again()

    # ---- ending

    def _write_final_checkpoint(self, order: protocol.WriteFinalCheckpoint) -> None:
        self.job_ends = True
        self._snapshots.write_final_checkpoint(order)

    def _kill(self, order: protocol.Kill) -> None:
        self.job_ends = self.job_ends or order.last
        doomed = [self._ranks[rank] for rank in order.ranks if rank in self._ranks]
        for rank in doomed:
            rank.signal(signal.SIGTERM if order.grace_s > 0 else signal.SIGKILL)
        if order.grace_s > 0:
            asyncio.get_running_loop().call_later(order.grace_s, self._kill_now, doomed)

    def _kill_now(self, doomed: list[RankProcess]) -> None:
        for rank in doomed:
            if self._ranks.get(rank.rank) is rank:
                rank.signal(signal.SIGKILL)

    @property
    def live(self) -> list[RankProcess]:
        """The live ranks."""
        return list(self._ranks.values())

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a shard of the training state."""
        return bool(self._shards)

    async def end(self) -> None:
        """End all processes of the node, except those that survive SIGKILL."""
        self._kill_now(list(self._ranks.values()))
        try:
            await asyncio.wait_for(self.all_gone(), names.KILLED_S)
        except asyncio.TimeoutError:
            say(f"ranks {sorted(self._ranks)} did not end after SIGKILL")
        await self._end_store()
        self._fork_servers.close()
        self._pages.close()
        self._output.close()

    async def all_gone(self) -> None:
        """Wait until no rank lives."""
        while self._ranks:
            self._gone.clear()
            await self._gone.wait()
