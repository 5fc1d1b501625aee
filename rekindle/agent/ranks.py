"""The ranks of one node: carries out the coordinator's orders about them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.devices.reset import heal
from rekindle.agent.environment import rank_environment
from rekindle.agent.fork_server import ForkServer
from rekindle.agent.fork_server_process import Order, RunRank
from rekindle.agent.mindspore_scheduler import worker_environment
from rekindle.agent.output import Console, Stream
from rekindle.agent.rank_process import RankProcess, clear
from rekindle.agent.rendezvous_process import StoreProcess, start_store
from rekindle.agent.snapshots.buffers import Snapshots
from rekindle.agent.watchdog import Lookout
from rekindle.errors import RekindleError
from rekindle.job.spec import Framework, JobSpec
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import Page
from rekindle.recovery.faults.fault import Exit

CONSOLE_S = 2.0


class NodeRanks:
    """The node's ranks, their zygote and (on one node of the job) their store.

    host: the file of the pretended host that the node is on; None: it is a real one.
    """

    def __init__(
        self,
        spec: JobSpec,
        snapshots: Snapshots,
        send: Callable[[protocol.Message], None],
        environment: dict[str, str],
        host: Path | None = None,
    ) -> None:
        self.node = 0
        self.profile, self.formed_at = protocol.Profile(), 0  # what ranks write down; ns, epoch
        self._spec = spec
        self._snapshots = snapshots
        self._send = send
        self._environment = environment
        self._host = host
        self._starts: Counter[int] = Counter()  # of each rank, so far
        self._ranks: dict[int, RankProcess] = {}
        self.lookout = Lookout(self._ranks, spec, send)
        self._pages: dict[int, tuple[int, Page]] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._zygote: ForkServer | None = None
        self._preload: Framework | None = None
        self._store: StoreProcess | None = None
        self._console = Console()
        self._gone = asyncio.Event()
        self._generation = 0  # the newest that was formed
        self._restart = 0  # the newest that ranks were started for
        self._training: set[int] = set()  # ranks that are in a Session
        self._waiting: dict[int, protocol.Arrived] = {}
        self._shards: dict[int, int] = {}  # of ranks that do not have the whole state
        self._ended: set[int] = set()  # ranks that ended with status 0
        self._tasks: set[asyncio.Future[None]] = set()

    def start_zygote(self, preload: Framework | None) -> None:
        """Start the process that ranks are forked from; its imports run while we connect."""
        self._preload = preload
        self._zygote = ForkServer(self._environment, preload=preload)

    def warm_up(self) -> None:
        """Have a process ready before the first one is asked for."""
        self._in_background(self._prepare())

    async def obey(self, message: protocol.Message) -> None:
        """Carry out one order of the coordinator."""
        match message:
            case protocol.Spawn():
                await self._spawn(message)
            case protocol.HostStore():
                await self._host_store(message)
            case protocol.Kill():
                self._kill(message)
            case protocol.Dump() | protocol.WriteParts() | protocol.Commit():
                self._snapshots.obey(message)
            case protocol.Look():
                self._in_background(self.lookout.look(message))
            case protocol.Form():
                self._generation = self.lookout.generation = message.generation
                self.profile, self.formed_at = message.profile, time.time_ns()
                self._waiting.clear()
                self._snapshots.formed(message)
                for rank in self._ranks.values():
                    own = {rank.rank: message.ranks[rank.rank]}
                    plan = {rank.rank: message.plan[rank.rank]}
                    rank.send(msgspec.structs.replace(message, ranks=own, plan=plan, depots={}))
            case protocol.CheckpointEvery() | protocol.Profile():
                self._hear(message)
            case protocol.Over():
                self._snapshots.break_off()
                self._tell_all(self._brought_up_to_date(message))
            case protocol.Inject() | protocol.Hold() if message.rank in self._ranks:
                self._ranks[message.rank].send(message)
            case protocol.Dismiss():
                self._training.clear()
                self._waiting.clear()
                self._tell_all(message)

    def _brought_up_to_date(self, over: protocol.Over) -> protocol.Over:
        """Name the steps that can still end by what the pages say now, also those of the dead."""
        pages = (page for _, page in self._pages.values())
        finished = max(((page.finished or 0) + page.in_update for page in pages), default=0)
        return msgspec.structs.replace(over, finished=max(over.finished, finished))

    def _hear(self, message: protocol.CheckpointEvery | protocol.Profile) -> None:
        if isinstance(message, protocol.Profile):
            self.profile = message
        self._tell_all(message)

    def _tell_all(self, message: protocol.Message) -> None:
        for rank in self._ranks.values():
            rank.send(message)

    def describe(self, hello: protocol.Hello, unsent: list[protocol.Exited]) -> protocol.Hello:
        """Tell in `hello` what a coordinator has to know that did not see these ranks start.

        unsent: ends of ranks that it will be told next; to it they still live.
        """
        pids = {rank.rank: rank.pid for rank in self._ranks.values()}
        pids |= {message.rank: message.pid for message in unsent}
        return msgspec.structs.replace(
            hello,
            node=self.node if pids or self._ended else hello.node,
            checkpoints=(*self._snapshots.checkpoints, *hello.checkpoints)[: names.OFFERS],
            snapshots=self._snapshots.kept,
            copies=self._snapshots.copies,
            shards=self._shards,
            generation=self._generation,
            restart=self._restart,
            ranks=tuple(
                protocol.LiveRank(rank=rank, pid=pid, training=rank in self._training)
                for rank, pid in sorted(pids.items())
            ),
            ended=tuple(sorted(self._ended - set(pids))),
            store=self._store.live(self._restart) if self._store is not None else None,
        )

    def devices(self) -> dict[int, int]:
        """Return the process on each device that this node's ranks were started on; 0: it ended.

        None on a pretended host: what is known of its devices is in its file.
        """
        if self._host is not None:
            return {}
        live, count = self._ranks, self._spec.processes_per_node
        return {rank % count: live[rank].pid if rank in live else 0 for rank in self._starts}

    @property
    def waiting(self) -> list[protocol.Arrived]:
        """Arrivals that no coordinator has answered yet."""
        return list(self._waiting.values())

    # ---- starting

    async def _spawn(self, spawn: protocol.Spawn) -> None:
        live: list[protocol.LiveRank] = []
        self._restart = spawn.restart
        if self._store is not None:
            self._store.serves(spawn.restart)
        try:
            for number in spawn.ranks:
                if number in spawn.heal and (error := await self._heal(number)):
                    self._send(protocol.HealFailed(rank=number, error=error))
                    continue
                try:
                    process = await self._start(number, spawn)
                except (RekindleError, OSError) as error:
                    self._send(protocol.SpawnFailed(rank=number, error=str(error)))
                else:
                    live.append(protocol.LiveRank(rank=number, pid=process.pid))
        finally:  # cancelled or not: whoever was started must be seen to end
            if live:
                self._send(protocol.Spawned(ranks=tuple(live), generation=spawn.generation))
            for started in live:
                rank = self._ranks[started.rank]
                rank.watch(started.pid, self._on_message, self._on_exit)

    async def _heal(self, rank: int) -> str:
        """Heal the device of a rank that has no process; return why not, or nothing."""
        return await heal(rank - self.node * self._spec.processes_per_node, self._host)

    async def _start(self, rank: int, spawn: protocol.Spawn) -> RankProcess:
        logs = Path(self._spec.log_directory, f"attempt_{spawn.restart}", str(rank))
        clear(logs)
        Path(self._metrics_file(rank)).parent.mkdir(parents=True, exist_ok=True)
        page_fd, page = self._page(rank)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page.new_life()
        process = RankProcess(rank, ours, page, logs)
        streams = [self._stream(rank, logs, fd) for fd in (1, 2)]
        environment = self._environment | rank_environment(
            self._spec,
            spawn,
            rank=rank,
            starts=self._starts[rank] + 1,
            logs=logs,
            metrics_file=self._metrics_file(rank),
        )
        if self._spec.framework is Framework.MINDSPORE:
            environment |= worker_environment(self._spec, spawn, rank, environment)
        request = RunRank(
            kind=self._spec.entry.value,
            target=self._spec.target,
            arguments=self._spec.arguments,
            environment=environment,
            working_directory=self._spec.working_directory,
        )
        try:
            fds = [theirs.fileno(), page_fd, *(stream.fd for stream in streams)]
            process.pid = await self.fork(request, fds)
        finally:
            theirs.close()
            for stream in streams:
                stream.started()
        self._starts[rank] += 1
        self._ranks[rank], self._streams[rank] = process, streams
        self._ended.discard(rank)
        return process

    async def fork(self, request: Order, fds: list[int]) -> int:
        """Fork from the zygote; a dead one (the kernel short of memory, say) is started anew."""
        assert self._zygote is not None
        if self._zygote.process.poll() is not None:
            self._zygote.close()
            self.start_zygote(self._preload)
        return await self._zygote.start(request, fds)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self) -> None:
        """Have a process ready for the next rank that dies; now, when ranks are at work again."""
        assert self._zygote is not None
        with contextlib.suppress(RekindleError):  # told when a rank has to be forked
            await self._zygote.keep_one_ready()

    def _page(self, rank: int) -> tuple[int, Page]:
        """Return the rank's page; a rank that is started anew finds what the dead one left."""
        if rank not in self._pages:
            fd = Page.create(f"{self._spec.job_id}-heartbeat{rank}")
            self._pages[rank] = fd, Page(fd)
        return self._pages[rank]

    def _stream(self, rank: int, logs: Path, fd: int) -> Stream:
        name = "stdout" if fd == 1 else "stderr"
        # torchrun's -r sends a stream to its file only, -t to both; both is our default.
        hidden = self._spec.redirects & fd and not self._spec.tee & fd
        prefix = f"[{self._spec.role}{rank}]:".encode()
        return Stream(
            logs / f"{name}.log",
            console=self._console,
            show_on=None if hidden else fd,
            prefix=prefix,
        )

    def _metrics_file(self, rank: int) -> str:
        return str(Path(self._spec.directory, names.METRICS_DIRECTORY, f"rank{rank}.jsonl"))

    # ---- the store

    async def _host_store(self, order: protocol.HostStore) -> None:
        if self._store is not None:
            self._store.end()
            self._store = None
        self._store = await start_store(self._spec, order, self.fork, self._send, self._environment)

    # ---- what ranks say

    def _on_message(self, rank: RankProcess, message: protocol.Message) -> None:
        match message:
            case protocol.SnapshotRoom() if message.copy is not None:
                self._snapshots.fetch(message, functools.partial(self._answer, rank))
            case protocol.SnapshotRoom():
                self._snapshots.room(message, functools.partial(self._answer, rank))
            case protocol.SnapshotTaken():
                self._snapshots.taken(message)
            case protocol.Arrived():
                self._training.add(message.rank)
                self._waiting[message.rank] = message
                if message.shard is not None:
                    self._shards[message.rank] = message.shard
                self._send(message)
            case protocol.StepDone():
                self._send(message)
                self._in_background(self._prepare())
            case _:
                self._send(message)

    def _answer(self, rank: RankProcess, answer: protocol.SnapshotBuffers, fds: list[int]) -> None:
        """Answer a rank that may have ended since it asked."""
        if self._ranks.get(rank.rank) is rank:
            rank.send(answer, fds)

    def _on_exit(self, rank: RankProcess, exit_: Exit) -> None:
        for stream in self._streams.pop(rank.rank, []):
            stream.drain()
        if self._ranks.get(rank.rank) is rank:
            del self._ranks[rank.rank]
        self._training.discard(rank.rank)
        self._waiting.pop(rank.rank, None)
        exited = protocol.Exited(
            rank=rank.rank,
            pid=rank.pid,
            exit=exit_,
            finished=rank.page.finished or 0,
            error=rank.error() if exit_.code != 0 else None,
            no_memory=exit_.signal == signal.SIGKILL
            and self.lookout.oom.killed_lately(time.monotonic()),
            at=time.time(),
        )
        if exit_.code == 0:
            self._in_background(self._tell_of_success(exited))
        else:
            self._send(exited)
        if not self._ranks:
            self._gone.set()

    async def _tell_of_success(self, exited: protocol.Exited) -> None:
        """Tell of a rank's end when its last checkpoint is written: it may be the job's end."""
        await self._snapshots.finish()
        self._ended.add(exited.rank)
        self._send(exited)

    def beat(self) -> protocol.Beat:
        """Read the heartbeat pages."""
        pages = {rank: self._pages[rank][1] for rank in sorted(self._ranks)}
        finished = {rank: page.finished or 0 for rank, page in pages.items()}
        first = next(iter(pages.values()), None)
        return protocol.Beat(
            finished=finished,
            total=first.total if first else 0,
            metrics=_numbers(first.last_record()) if first else {},
        )

    # ---- ending

    def _kill(self, order: protocol.Kill) -> None:
        doomed = [self._ranks[rank] for rank in order.ranks if rank in self._ranks]
        for rank in doomed:
            rank.signal(signal.SIGTERM if order.grace_s > 0 else signal.SIGKILL)
        if order.grace_s > 0:
            asyncio.get_running_loop().call_later(order.grace_s, self._kill_now, doomed)

    def _kill_now(self, doomed: list[RankProcess]) -> None:
        for rank in doomed:
            if self._ranks.get(rank.rank) is rank:
                rank.signal(signal.SIGKILL)

    async def end(self) -> None:
        """End all that is left, at once; a process that the kernel holds is left to it."""
        self._kill_now(list(self._ranks.values()))
        try:
            await asyncio.wait_for(self._all_gone(), names.KILLED_S)
        except asyncio.TimeoutError:
            print(f"rekindle agent: ranks {sorted(self._ranks)} outlive SIGKILL", file=sys.stderr)
        if self._store is not None:
            self._store.end()
        if self._zygote is not None:
            self._zygote.close()
        for fd, page in self._pages.values():
            page.close()
            os.close(fd)
        self._console.close(CONSOLE_S)

    async def _all_gone(self) -> None:
        while self._ranks:
            self._gone.clear()
            await self._gone.wait()


def _numbers(record: bytes) -> dict[str, float]:
    """Return the plain numbers of a step record; one that is being written reads as none."""
    try:
        metrics = json.loads(record)["metrics"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: float(v) for name, v in metrics.items() if isinstance(v, (int, float))}
