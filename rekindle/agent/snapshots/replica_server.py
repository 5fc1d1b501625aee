"""Keeps replicas of other nodes' snapshots in an agent's memory, and serves them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from rekindle import names
from rekindle.agent.memory_limits import create_buffer
from rekindle.agent.snapshots.replica_transport import (
    ANSWERS,
    REQUESTS,
    SILENCE_S,
    Credentials,
    Fetch,
    Put,
    ReplicaAnswer,
    ReplicaConnection,
    patience_s,
)
from rekindle.agent.threads import in_pool
from rekindle.errors import CheckpointError, CorruptError, ProtocolError, StaleError
from rekindle.job.spec import JobSpec
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import BUFFERS_OF_SHARD, SnapshotBuffer, seal
from rekindle.states import StateId, Suspicion, is_clean
from rekindle.supervised import in_background, within

_Reading = Callable[[int, StateId], AbstractAsyncContextManager[SnapshotBuffer]]
KEPT = 2  # states of each rank, because ranks may differ by one snapshot

# ---- the replica server's end


@dataclass(slots=True, eq=False)
class _Copy:
    """A snapshot. generation: the newest one for which an agent sent it; it may be older."""

    generation: int
    fd: int
    buffer: SnapshotBuffer

    @property
    def state(self) -> StateId:
        """The state in the copy, which is valid as long as the server keeps it."""
        return self.buffer.state or StateId(0, 0)

    def close(self) -> None:
        self.buffer.close()
        os.close(self.fd)


class ReplicaServer:
    """Keeps the newest snapshots of other nodes' ranks, and reports them to the coordinator.

    own: gives the copies that this agent has of what its own ranks share with no other.
    """

    def __init__(
        self, spec: JobSpec, credentials: Credentials, tell: Callable[[protocol.Message], None]
    ) -> None:
        self._spec, self._credentials, self._tell = spec, credentials, tell
        self._copies: dict[int, list[_Copy]] = defaultdict(list)  # by rank, the newest last
        self._room: dict[int, list[_Copy]] = defaultdict(list)  # memory for the next snapshots
        self._busy: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._generation = 0  # the newest one that ranks formed
        self.own: _Reading = self.reading
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="serves")

    def listen(self, address: str) -> int:
        """Accept callers; return the port. address: the address of this machine for others."""
        host = address if address == names.LOOPBACK else ""
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.setblocking(False)
        in_background(self._accept(self._socket), self._tasks)
        return int(self._socket.getsockname()[1])

    @property
    def kept(self) -> dict[int, tuple[StateId, ...]]:
        """The states that the server keeps, by rank."""
        return {rank: self._states(rank) for rank in list(self._copies)}

    def formed(self, form: protocol.FormGeneration) -> None:
        """Start a generation: drop copies of states that it trains again, and suspicious ones.

        The server drops copies that earlier generations sent with more steps than the starting
        state of this one. It also refuses such copies later.
        """
        self._generation = form.generation
        for rank in list(self._copies):
            self._forget_after(rank, form.generation, form.step, form.suspicions)

    def _forget_after(
        self, rank: int, generation: int, step: int, suspicions: Iterable[Suspicion] = ()
    ) -> None:
        copies, suspicions = self._copies[rank], tuple(suspicions)
        stale = [
            copy
            for copy in copies
            if (copy.generation < generation and copy.state.step > step)
            or not is_clean(copy.state, suspicions)
        ]
        if stale:
            self._copies[rank] = [copy for copy in copies if copy not in stale]
            self._room[rank] += stale  # not closed, because another task may still use one of them
            self._tell(protocol.Snapshots(kept={rank: self._states(rank)}, copies=True))

    @contextlib.asynccontextmanager
    async def reading(self, rank: int, state: StateId) -> AsyncIterator[SnapshotBuffer]:
        """Lock and yield the copy of a state. Raises CheckpointError: there is no such copy."""
        async with self._busy[rank]:
            found = [copy for copy in self._copies[rank] if copy.state == state]
            if not found:
                there = [tuple(each) for each in self._states(rank)]
                raise CheckpointError(
                    f"there is no replica of rank {rank} after step {state.step} of generation "
                    f"{state.generation}; replicas exist of (step, generation) {there}"
                )
            yield found[0].buffer

    async def close(self) -> None:
        """Stop serving, and free the memory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()
        if self._socket is not None:
            self._socket.close()
        for copy in (c for each in (self._room, self._copies) for cs in each.values() for c in cs):
            copy.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files, or the caller has ended
                await asyncio.sleep(0.1)
                continue
            in_background(self._serve(sock), self._tasks)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one caller. Refuse one from another attempt, and disconnect a silent one."""
        with sock, contextlib.suppress(OSError, asyncio.TimeoutError, ProtocolError):
            connection = ReplicaConnection(sock, self._credentials.secret, serves=True)
            request = await within(_first(connection), connection.silence_s)
            error = self._refusal(request)
            if error:
                await connection.say(ReplicaAnswer(error=error))
            elif isinstance(request, Put):
                async with self._busy[request.rank]:
                    await self._take(connection, request)
            else:
                await self._give(connection, request)

    def _refusal(self, request: Put | Fetch) -> str:
        theirs, ours = (
            (request.job_id, request.attempt),
            (self._credentials.job_id, self._credentials.attempt),
        )
        if theirs != ours:
            return f"the caller has (job, attempt) {theirs}, this agent has {ours}"
        known = 0 <= request.rank < self._spec.world_size
        return "" if known else f"there is no rank {request.rank}"

    async def _give(self, connection: ReplicaConnection, request: Fetch) -> None:
        try:
            source = self.own if request.own else self.reading
            async with source(request.rank, StateId(*request.state)) as buffer:
                with buffer.file as content:
                    checksum = buffer.checksum or seal(content)  # an own copy has no seal
                    await connection.say(ReplicaAnswer(bytes=len(content), checksum=checksum))
                    # The caller first makes its memory.
                    connection.silence_s = patience_s(BUFFERS_OF_SHARD * len(content))
                    await connection.send(content)
        except CheckpointError as error:
            await connection.say(ReplicaAnswer(error=str(error)))

    async def _take(self, connection: ReplicaConnection, put: Put) -> None:
        self._forget_after(put.rank, put.generation, put.since)  # `formed` may be later
        if self._has(put):
            await connection.say(ReplicaAnswer())
            return
        try:
            copy = await self._make_room(put)
        except OSError as error:
            text = (
                f"the node does not have memory for a replica of {put.bytes} bytes: "
                f"{error.strerror}"
            )
            await connection.say(ReplicaAnswer(error=text))
            return
        answer = ReplicaAnswer(error="the transfer was interrupted")
        try:
            await connection.say(ReplicaAnswer(bytes=put.bytes))
            with copy.buffer.data[: put.bytes] as content:
                arrived = await connection.receive(content)
            answer = self._judge(put, arrived)
        finally:
            if answer == ReplicaAnswer():
                copy.buffer.commit(StateId(*put.state), put.bytes, put.checksum)
                self._keep(put, copy)
            else:
                self._room[put.rank].append(copy)
        await connection.say(answer)

    def _has(self, put: Put) -> bool:
        """Return whether the snapshot is here, or older than the states to keep."""
        for copy in self._copies[put.rank]:
            if copy.state == put.state and copy.buffer.checksum == put.checksum:
                copy.generation = max(copy.generation, put.generation)
                return True
        kept = self._states(put.rank)
        return len(kept) == KEPT and put.state < kept[0]

    async def _make_room(self, put: Put) -> _Copy:
        """Return memory for a snapshot. Raises OSError: there is not enough."""
        rooms, self._room[put.rank] = self._room[put.rank], []
        fitting = [room for room in rooms if len(room.buffer.data) >= put.bytes][:1]
        for room in rooms:
            if room not in fitting:
                room.close()
        if not fitting:
            name = f"{self._spec.job_id}-copy{put.rank}"
            fd = await in_pool(self._threads, create_buffer, name, put.bytes)
            fitting = [_Copy(put.generation, fd, SnapshotBuffer(fd))]
        [copy] = fitting
        copy.generation = put.generation
        copy.buffer.begin()
        return copy

    def _judge(self, put: Put, arrived: str) -> ReplicaAnswer:
        """Return the answer for the received bytes: to keep them, or an error."""
        if arrived != put.checksum:
            return ReplicaAnswer(
                error=f"the received bytes have checksum {arrived}, not {put.checksum}"
            )
        return ReplicaAnswer(stale=put.generation < self._generation)

    def _keep(self, put: Put, copy: _Copy) -> None:
        """Keep a snapshot, and drop the oldest, or one of the same state."""
        before = self._copies[put.rank]
        others = (c for c in before if c.state != put.state)
        kept = sorted([*others, copy], key=lambda each: each.state)[-KEPT:]
        self._copies[put.rank] = kept
        self._room[put.rank] += [c for c in (*before, copy) if c not in kept]
        self._tell(protocol.Snapshots(kept={put.rank: self._states(put.rank)}, copies=True))

    def _states(self, rank: int) -> tuple[StateId, ...]:
        return tuple(copy.state for copy in self._copies[rank])


async def _first(connection: ReplicaConnection) -> Put | Fetch:
    await connection.meet()
    return await connection.receive_message(REQUESTS)


# ---- the caller's end


async def put(
    at: protocol.ReplicaAddress,
    credentials: Credentials,
    buffer: SnapshotBuffer,
    *,
    rank: int,
    form: protocol.FormGeneration,
) -> None:
    """Send a sealed snapshot to another node's agent, for the generation of `form`.

    Raises CheckpointError: the agent does not keep it. Raises StaleError: the snapshot is from an
    earlier generation.
    """
    with buffer.file as content:
        request = Put(
            job_id=credentials.job_id,
            attempt=credentials.attempt,
            rank=rank,
            generation=form.generation,
            since=form.step,
            state=buffer.state or StateId(0, 0),
            bytes=len(content),
            checksum=buffer.checksum,
        )
        limit_s = patience_s(len(content))
        async with _called(at, credentials) as connection:
            await connection.say(request)
            if (await _answer(connection, limit_s)).bytes:
                await connection.send(content)
                await _answer(connection, limit_s)


async def fetch(
    at: protocol.ReplicaAddress,
    credentials: Credentials,
    make_room: Callable[[int], Awaitable[SnapshotBuffer]],
    *,
    rank: int,
    state: StateId,
    own: bool = False,
) -> None:
    """Fetch a copy from another node's agent into the buffer that `make_room(bytes)` returns.

    own: as in Fetch.
    Raises CheckpointError: the copy is unavailable. Raises CorruptError: its checksum is wrong.
    """
    known = credentials
    request = Fetch(job_id=known.job_id, attempt=known.attempt, rank=rank, state=state, own=own)
    async with _called(at, credentials) as connection:
        await connection.say(request)
        answer = await _answer(connection, 3 * SILENCE_S)  # a silent sender may block it
        buffer = await make_room(answer.bytes)
        buffer.begin()
        with buffer.data[: answer.bytes] as content:
            arrived = await connection.receive(content)
        if arrived != answer.checksum:
            raise CorruptError(
                f"the replica of rank {rank} after step {state.step} has checksum {arrived}, not "
                f"{answer.checksum}"
            )
        # No await may separate these lines. The end of a generation would interrupt the task, and
        # its rank would wait without end for a seal.
        buffer.commit(state, answer.bytes, arrived)
        buffer.release_writer()


@contextlib.asynccontextmanager
async def _called(
    at: protocol.ReplicaAddress, credentials: Credentials
) -> AsyncIterator[ReplicaConnection]:
    """Connect to a replica server. Raises CheckpointError: the connection fails or breaks."""
    loop = asyncio.get_running_loop()
    try:
        with socket.socket() as sock:
            connection = ReplicaConnection(sock, credentials.secret, serves=False)
            named = loop.getaddrinfo(at.host, at.port, family=socket.AF_INET)
            [(*_, address), *_] = await within(named, connection.silence_s)
            await within(loop.sock_connect(sock, address), connection.silence_s)
            await connection.meet()
            yield connection
    except asyncio.TimeoutError as error:
        raise CheckpointError(f"the agent at {at.host}:{at.port} does not answer") from error
    except StaleError:
        raise
    except (OSError, ProtocolError) as error:
        raise CheckpointError(f"the agent at {at.host}:{at.port}: {error}") from error


async def _answer(connection: ReplicaConnection, limit_s: float) -> ReplicaAnswer:
    """Wait for the answer. Raises CheckpointError or StaleError: it is a refusal."""
    answer = await connection.receive_message(ANSWERS, limit_s=limit_s)
    if answer.error:
        raise CheckpointError(answer.error)
    if answer.stale:
        raise StaleError("the snapshot belongs to an earlier generation")
    return answer
