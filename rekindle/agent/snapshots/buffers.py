"""The snapshots of one node: the agent's buffers, their seals, and their way to the store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rekindle.agent.memory_limits import create_buffer
from rekindle.agent.snapshots.checkpoint_queue import CheckpointFiles, DueCheckpoints
from rekindle.agent.snapshots.own_copies import Held, OwnCopies, SendGrant
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.threads import in_pool
from rekindle.checkpoints.store import CheckpointStore
from rekindle.console import say
from rekindle.errors import CheckpointError, CorruptError
from rekindle.job.spec import JobSpec
from rekindle.names import OFFERS
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId, is_clean
from rekindle.supervised import in_background, within

_ROOM = 65536  # bytes that a buffer has in addition to the request
_TICK_S = 0.005
SILENT_S = 10.0  # the end of a job waits no longer for the store without a line
MAKERS = 8  # threads that make memory; more are not faster


class NodeSnapshots:
    """Buffers by rank. Threads do the work on their bytes; training and agent continue."""

    def __init__(
        self,
        spec: JobSpec,
        store: CheckpointStore,
        send: Callable[[protocol.Message], None],
        *,
        replica_server: ReplicaServer,
        replica_client: ReplicaClient,
    ) -> None:
        self._spec = spec
        self._files = CheckpointFiles(spec, store)
        self._send = send
        self._replica_server = replica_server
        self._replica_client = replica_client
        self._buffers: dict[int, Held] = {}
        self._making: dict[int, asyncio.Task[None]] = {}
        self.own = OwnCopies(self._make, self._close, replica_client)
        replica_server.own = self.own.reading
        self._makes = ThreadPoolExecutor(max_workers=MAKERS, thread_name_prefix="buffers")
        self._closing = threading.Event()
        self._seals = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seals")
        self._writes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self.kept: dict[int, tuple[StateId, ...]] = {}  # the sealed snapshots of each rank
        self.checkpoints: tuple[StateId, ...] = ()  # the checkpoints of this node, newest first
        self._jobs: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()  # requests of ranks; no job waits for them
        self._due = DueCheckpoints(self._files, self._writes, self._tell, self._start)

    def room(self, wanted: protocol.BufferRequest, answer: SendGrant) -> None:
        """Answer a rank with its buffers; make larger ones if they are too small.

        If the rank wants a copy, one of the buffers first gets the replica that another node keeps.
        """
        if wanted.own:
            self._start(self.own.room(wanted, answer), self._asking)
        elif wanted.copy is not None:
            self._start(self._fetch(wanted, answer), self._asking)
        elif self._fitting(wanted.rank, wanted.bytes) or not wanted.bytes:
            self._offer(wanted, answer)
        else:
            self._start(self._room(wanted, answer), self._asking)

    async def _room(self, wanted: protocol.BufferRequest, answer: SendGrant) -> None:
        error = ""
        try:
            await self._have(wanted, wanted.bytes)
        except CheckpointError as failed:
            error = str(failed)
            self._send(protocol.SnapshotRefused(rank=wanted.rank, error=error))
        self._offer(wanted, answer, error)

    def _offer(self, wanted: protocol.BufferRequest, answer: SendGrant, error: str = "") -> None:
        fds = [fd for fd, _ in self._buffers.get(wanted.rank, ())] if not error else []
        error = error or ("" if fds else f"there is no snapshot of rank {wanted.rank}")
        answer(protocol.BufferGrant(error=error, serial=wanted.serial), fds)

    def _fitting(self, rank: int, data_bytes: int) -> Held:
        """Return the buffers of a rank; empty: it has none, or they are too small."""
        held = self._buffers.get(rank, [])
        return held if held and len(held[0][1].data) >= data_bytes else []

    async def _have(self, wanted: protocol.BufferRequest, data_bytes: int) -> Held:
        """Return the buffers of a rank; replace those that are too small.

        Raises CheckpointError: there is not enough memory.
        """
        rank = wanted.rank
        while not (held := self._fitting(rank, data_bytes)):
            if rank not in self._making:
                making = asyncio.ensure_future(self._remake(rank, wanted.buffers, data_bytes))
                making.add_done_callback(lambda done: done.exception())  # the requests see it
                self._making[rank] = making
            # A request may be interrupted, or its rank may die; the next request uses the memory.
            await asyncio.shield(self._making[rank])
        return held

    async def _remake(self, rank: int, count: int, data_bytes: int) -> None:
        try:
            old = self._buffers.pop(rank, [])
            if not old:
                self._buffers[rank] = await self._make(rank, count, data_bytes)
                return
            self._sealed(rank)  # the rank has no snapshots now
            closing = self._start(self._close(old, set(self._jobs)))
            try:
                held = await self._make(rank, count, data_bytes)
            except CheckpointError:
                await closing  # a job may still have read the old ones
                held = await self._make(rank, count, data_bytes)
            self._buffers[rank] = held
        finally:
            del self._making[rank]

    async def _make(self, rank: int, count: int, data_bytes: int) -> Held:
        loop, name = asyncio.get_running_loop(), f"{self._spec.job_id}-rank{rank}"
        # Another process of the rank may need a few bytes more than this one.
        size = data_bytes + _ROOM
        making = [
            loop.run_in_executor(self._makes, create_buffer, f"{name}-{i}", size, self._closing)
            for i in range(count)
        ]
        state = await asyncio.gather(*making, return_exceptions=True)
        fds = [each for each in state if isinstance(each, int)]
        held: Held = []
        try:
            for each in state:
                if isinstance(each, BaseException):
                    raise each
                held.append((each, SnapshotBuffer(each)))
        except BaseException as error:
            for _, buffer in held:
                buffer.close()
            for fd in fds:
                os.close(fd)
            if not isinstance(error, OSError):
                raise
            text = (
                f"the node does not have memory for {count} snapshots of {data_bytes} bytes: "
                f"{error.strerror}"
            )
            raise CheckpointError(text) from error
        return held

    async def _fetch(self, wanted: protocol.BufferRequest, answer: SendGrant) -> None:
        error = ""
        with contextlib.ExitStack() as used:
            make_room = functools.partial(self._room_for_copy, wanted, used)
            try:
                await self._replica_client.fetch(
                    wanted.rank, wanted.copy or StateId(0, 0), make_room
                )
            except CheckpointError as failed:
                error = str(failed)
        if self._buffers.get(wanted.rank):
            self._sealed(wanted.rank)  # the copy has overwritten an older one, even if it failed
        self._offer(wanted, answer, error)

    async def _room_for_copy(
        self, wanted: protocol.BufferRequest, used: contextlib.ExitStack, data_bytes: int
    ) -> SnapshotBuffer:
        """Lock a buffer for a copy: one with a damaged snapshot of its state, or the oldest."""
        held = await self._have(wanted, data_bytes)
        fd, _ = min(held, key=lambda each: (each[1].state != wanted.copy, each[1].recency))
        buffer = SnapshotBuffer(fd)  # with its own locks, because a job may read it here
        used.callback(buffer.close)
        while not buffer.lock(write=True):
            await asyncio.sleep(_TICK_S)
        return buffer

    def taken(self, message: protocol.SnapshotTaken) -> None:
        """Seal a new snapshot of a rank and, if it is due, write it to the store."""
        self._start(self._keep(message, *self._buffers[message.rank][message.buffer]))

    def _start(
        self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]] | None = None
    ) -> asyncio.Task[None]:
        return in_background(work, self._jobs if among is None else among)

    async def _keep(self, message: protocol.SnapshotTaken, fd: int, buffer: SnapshotBuffer) -> None:
        state = StateId(message.step, message.generation)
        if not await in_pool(self._seals, _seal, buffer, state):
            return
        try:
            self._sealed(message.rank)
            await self._replica_client.copy(message.rank, buffer, state)
            if message.checkpoint and buffer.state == state:  # otherwise the agent dropped it
                self._due.due(message, fd)
        finally:
            buffer.release_writer()  # also after a bug of ours, because the rank waits for it
            buffer.unlock()

    def _sealed(self, rank: int) -> None:
        sealed = [buffer for _, buffer in self._buffers.get(rank, ()) if buffer.is_sealed]
        # The rank may be about to overwrite one of them.
        self.kept[rank] = tuple(state for buffer in sealed if (state := buffer.state) is not None)
        self._send(protocol.Snapshots(kept={rank: self.kept[rank]}))

    def _tell(self, message: protocol.Message) -> None:
        """Report the result for checkpoints, and remember which checkpoints exist."""
        match message:
            case protocol.CheckpointWritten(error=""):
                state = StateId(message.step, message.generation)
                self.checkpoints = (state, *self.checkpoints)[:OFFERS]
            case protocol.Pruned(removed=removed):
                self.checkpoints = tuple(
                    state for state in self.checkpoints if state not in removed
                )
        self._send(message)

    def write_parts(self, order: protocol.WriteShards) -> None:
        """Write the node's shards of a checkpoint that all nodes write now."""
        self._due.write_parts(order)

    def write_final_checkpoint(self, order: protocol.WriteFinalCheckpoint) -> None:
        """Write the final checkpoint: the newest intact snapshot, or the shards of the order."""
        self._start(self._write_final_checkpoint(order, set(self._jobs)))

    async def _write_final_checkpoint(
        self, order: protocol.WriteFinalCheckpoint, earlier: set[asyncio.Task[None]]
    ) -> None:
        if earlier:
            await asyncio.wait(earlier)  # an unsealed snapshot may be newer
        if not order.shards:
            written = await in_pool(self._writes, self._write_newest, order)
            self._tell(msgspec.structs.replace(written, final=True))
        for shard, rank in order.shards.items():
            part = await self._write_final_shard(order, shard, rank)
            self._tell(msgspec.structs.replace(part, final=True))

    async def write_alone(self) -> protocol.CheckpointWritten | None:
        """Write the newest snapshot as a checkpoint, without an order. None: there is no snapshot.

        Call it only if the snapshots hold the complete state. Other agents may write the same one.
        """
        await self.finish()  # an unsealed snapshot may be newer
        states = [state for kept in self.kept.values() for state in kept]
        if not states:
            return None
        step, generation = max(states)
        order = protocol.WriteFinalCheckpoint(step=step, generation=generation)
        return await in_pool(self._writes, self._write_newest, order)

    def commit(self, order: protocol.Commit) -> None:
        """Commit the checkpoint whose shards are all in the store."""
        self._start(self._commit(order))

    async def _commit(self, order: protocol.Commit) -> None:
        written = await in_pool(self._writes, self._files.commit, order)
        self._tell(written)
        if not order.final:
            await self._due.prune(written)

    @property
    def copies(self) -> dict[int, tuple[StateId, ...]]:
        """The copies that this node keeps for ranks of other nodes."""
        return self._replica_server.kept

    def formed(self, form: protocol.FormGeneration) -> None:
        """Start a generation, whose plan names the nodes that keep copies.

        This drops suspicious snapshots. It also drops snapshots of shards that are newer than the
        generation's starting state. The ranks train those steps again, and the old snapshots must
        not occupy the room of the new ones.
        """
        self._due.formed()
        self._forget(form)
        if form.shards == 1:
            return
        self._replica_server.formed(form)
        self._replica_client.formed(form)
        for rank in form.plan:
            self._start(self._copy_again(rank))

    def break_off(self) -> None:
        """End the generation: no further copies belong to it."""
        self._replica_client.break_off()

    async def _copy_again(self, rank: int) -> None:
        """Send the snapshots of a rank again. A node that has one already refuses it."""
        in_order = sorted(self._buffers.get(rank, ()), key=lambda each: each[1].recency)
        for fd, _ in in_order:
            own = SnapshotBuffer(fd)  # with its own locks
            if own.lock(write=False) and own.is_sealed:
                await self._replica_client.copy(rank, own, own.recency)
            own.close()

    def _forget(self, form: protocol.FormGeneration) -> None:
        for rank, pair in self._buffers.items():
            valid = [(buffer, buffer.state) for _, buffer in pair if buffer.state is not None]
            stale = [
                buffer
                for buffer, state in valid
                if (form.shards > 1 and state.step > form.step)
                or not is_clean(state, form.suspicions)
            ]
            for buffer in stale:
                buffer.begin()
            if stale:
                self._sealed(rank)

    def _write_newest(self, order: protocol.WriteFinalCheckpoint) -> protocol.CheckpointWritten:
        sealed = [b for pair in self._buffers.values() for _, b in pair if b.is_sealed]
        clean = [buffer for buffer in sealed if is_clean(buffer.recency, order.suspicions)]
        error = "there is no snapshot"
        for buffer in sorted(clean, key=lambda buffer: buffer.recency, reverse=True):
            state = buffer.recency
            try:
                buffer.verify()
            except CorruptError as corrupt:
                error = str(corrupt)
                continue
            return self._files.write(state, buffer)
        return protocol.CheckpointWritten(step=order.step, generation=order.generation, error=error)

    async def _write_final_shard(
        self, order: protocol.WriteFinalCheckpoint, shard: int, rank: int
    ) -> protocol.ShardWritten:
        """Write the snapshot, or the copy, that this node has of a rank in exactly this state."""
        state = StateId(order.step, order.generation)
        held = [b for _, b in self._buffers.get(rank, ()) if b.is_sealed and b.state == state]
        copy = self._replica_server.reading(rank, state)
        try:
            async with contextlib.nullcontext(held[0]) if held else copy as buffer:
                write = self._write_proven
                return await in_pool(self._writes, write, state, shard, order.of, buffer)
        except CheckpointError as error:
            return protocol.ShardWritten(
                step=order.step,
                generation=order.generation,
                shard=shard,
                shards=order.of,
                error=str(error),
            )

    def _write_proven(
        self, state: StateId, shard: int, shards: int, buffer: SnapshotBuffer
    ) -> protocol.ShardWritten:
        buffer.verify()
        return self._files.write_part(state, shard, shards, buffer)

    async def finish(self) -> None:
        """Wait for running seals and writes, so that a finished job keeps its last checkpoint."""
        while self._jobs:
            await asyncio.wait(list(self._jobs))

    async def finish_in_time(self) -> None:
        """Wait as `finish` does, for dump_timeout_s of the policy at most.

        The store may hang, so a line says what the job waits for. Checkpoints that the store has
        not taken in time have failed.
        """
        limit_s = self._spec.policy.dump_timeout_s
        try:
            await within(self.finish(), min(SILENT_S, limit_s))
        except asyncio.TimeoutError:
            say(
                f"the end of the job waits for the checkpoint store, for {limit_s:g} s at most: "
                f"it has not answered for {min(SILENT_S, limit_s):g} s"
            )
            try:
                await within(self.finish(), max(0.0, limit_s - SILENT_S))
            except asyncio.TimeoutError:
                self._due.give_up(f"the store has not answered for {limit_s:g} s")

    async def close(self) -> bool:
        """Free the memory after the running work has ended. False: it takes too long.

        The limit is dump_timeout_s of the policy. If a store hangs, nothing ends the thread that
        writes to it.
        """
        limit_s = self._spec.policy.dump_timeout_s
        self._replica_client.break_off()
        self._closing.set()
        while self._asking:
            await asyncio.wait(list(self._asking))
        try:
            await within(self.finish(), limit_s)
        except asyncio.TimeoutError:
            say(
                f"the agent ends, although the checkpoint store has not answered for {limit_s:g} s",
                logging.ERROR,
            )
            return False
        self._due.formed()
        await self.own.close()
        for held in self._buffers.values():
            await self._close(held)
        self._makes.shutdown()
        self._seals.shutdown()
        self._writes.shutdown()
        return True

    async def _close(self, pair: Held, users: Collection[asyncio.Task[None]] = ()) -> None:
        """Close buffers after their last possible readers have ended."""
        if users:
            await asyncio.wait(users)
        for fd, buffer in pair:
            buffer.close()
            os.close(fd)


def _seal(buffer: SnapshotBuffer, state: StateId) -> bool:
    """Seal the snapshot of a state and keep the buffer locked; False: it has another state."""
    buffer.lock(write=False, wait=True)
    if buffer.state != state:
        buffer.unlock()
        return False
    buffer.seal()
    return True
