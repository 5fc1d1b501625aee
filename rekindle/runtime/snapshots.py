"""The snapshots of one node: the agent's buffers, their seals, and their way into the store."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rekindle import __version__
from rekindle.checkpoints.directory import DirectoryStore, Part
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.manifest import Manifest
from rekindle.errors import CheckpointError, CorruptError
from rekindle.names import OFFERS
from rekindle.runtime import protocol
from rekindle.runtime.snapshot import SnapshotBuffer
from rekindle.runtime.spec import JobSpec

METADATA_POSITION = "data_position"  # key of the snapshot's metadata, a JSON object


def state_file(shard: int) -> str:
    """Return the name of a checkpoint's file with this shard; of a whole state it is shard 0."""
    return f"state-{shard:05d}.safetensors"


class Snapshots:
    """Buffers by rank. Work on their bytes is done in a thread; training and agent go on."""

    def __init__(
        self, spec: JobSpec, store: DirectoryStore, send: Callable[[protocol.Message], None]
    ) -> None:
        self._spec = spec
        self._store = store
        self._send = send
        self._buffers: dict[int, list[tuple[int, SnapshotBuffer]]] = {}
        self._seals = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seals")
        self._writes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self.steps: dict[int, tuple[int, ...]] = {}  # of the sealed snapshots of each rank
        self.checkpoints: tuple[int, ...] = ()  # steps of those written here, newest first
        self._jobs: set[asyncio.Task[None]] = set()

    def room(self, wanted: protocol.SnapshotRoom) -> tuple[protocol.SnapshotBuffers, list[int]]:
        """Answer a rank: its buffers, made anew if they are too small."""
        rank, data_bytes = wanted.rank, wanted.bytes
        held = self._buffers.get(rank, [])
        if data_bytes and held and len(held[0][1].data) < data_bytes:
            self._start(self._close(self._buffers.pop(rank), set(self._jobs)))
            held = []
        if data_bytes and not held:
            try:
                held = [self._make(rank, index, data_bytes) for index in range(wanted.buffers)]
            except OSError as error:
                text = (
                    f"no memory for {wanted.buffers} snapshots of {data_bytes} bytes: "
                    f"{error.strerror}"
                )
                self._send(protocol.CheckpointWritten(step=0, error=text))
                return protocol.SnapshotBuffers(error=text), []
            self._buffers[rank] = held
        if not held:
            return protocol.SnapshotBuffers(error=f"there is no snapshot of rank {rank}"), []
        return protocol.SnapshotBuffers(), [fd for fd, _ in held]

    def _make(self, rank: int, index: int, data_bytes: int) -> tuple[int, SnapshotBuffer]:
        fd = SnapshotBuffer.create(f"{self._spec.job_id}-rank{rank}-{index}", data_bytes)
        return fd, SnapshotBuffer(fd)

    def taken(self, message: protocol.SnapshotTaken) -> None:
        """Seal a snapshot that a rank has just taken and, if asked to, write it to the store."""
        self._start(self._keep(message, self._buffers[message.rank][message.buffer][1]))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._done)

    def _done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        job.result()  # an error here is a bug: let it be seen

    async def _keep(self, message: protocol.SnapshotTaken, buffer: SnapshotBuffer) -> None:
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._seals, _seal, buffer, message.step):
            return
        try:
            self._sealed(message.rank)
            if message.checkpoint:
                # A thread of its own: a slow store must not keep snapshots from being sealed.
                write = self._write if message.shards == 1 else self._write_part
                work = functools.partial(write, message, buffer)
                self._tell(await loop.run_in_executor(self._writes, work))
        finally:
            buffer.unlock()

    def _sealed(self, rank: int) -> None:
        sealed = [buffer for _, buffer in self._buffers[rank] if buffer.is_sealed]
        self.steps[rank] = tuple(buffer.step or 0 for buffer in sealed)
        self._send(protocol.Snapshots(steps={rank: self.steps[rank]}))

    def _tell(self, written: protocol.CheckpointWritten | protocol.PartWritten) -> None:
        if isinstance(written, protocol.CheckpointWritten) and not written.error:
            self.checkpoints = (written.step, *self.checkpoints)[:OFFERS]
        self._send(written)

    def dump(self, order: protocol.Dump) -> None:
        """Write last words: the newest intact snapshot, or the shards that are asked for."""
        self._start(self._dump(order, set(self._jobs)))

    async def _dump(self, order: protocol.Dump, earlier: set[asyncio.Task[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)  # what is being sealed may be newer than what is asked for
        loop = asyncio.get_running_loop()
        if not order.shards:
            written = await loop.run_in_executor(self._writes, self._write_newest, order)
            self._tell(msgspec.structs.replace(written, last_words=True))
        for shard, rank in order.shards.items():
            work = functools.partial(self._write_shard, order, shard, rank)
            part = await loop.run_in_executor(self._writes, work)
            self._tell(msgspec.structs.replace(part, last_words=True))

    def commit(self, order: protocol.Commit) -> None:
        """Make the checkpoint valid whose shards are all written."""
        self._start(self._commit(order))

    async def _commit(self, order: protocol.Commit) -> None:
        loop = asyncio.get_running_loop()
        self._tell(await loop.run_in_executor(self._writes, self._commit_now, order))

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of shards that are newer than what training goes on from.

        They are of steps that are done again, perhaps not bit by bit the same, and must never be
        put together with the new ones.
        """
        for rank, pair in self._buffers.items():
            newer = [b for _, b in pair if b.step is not None and b.step > step]
            for buffer in newer:
                buffer.begin()
            if newer:
                self._sealed(rank)

    def _write_newest(self, order: protocol.Dump) -> protocol.CheckpointWritten:
        sealed = [b for pair in self._buffers.values() for _, b in pair if b.is_sealed]
        sealed.sort(key=lambda buffer: buffer.step or 0, reverse=True)
        error = "there is no snapshot"
        for buffer in sealed:
            step = buffer.step or 0
            try:
                buffer.verify()
            except CorruptError as corrupt:
                error = str(corrupt)
                continue
            return self._write(msgspec.structs.replace(order, step=step), buffer)
        return protocol.CheckpointWritten(step=order.step, error=error)

    def _write_shard(self, order: protocol.Dump, shard: int, rank: int) -> protocol.PartWritten:
        """Write the snapshot that a rank has of this very step."""
        part = protocol.PartWritten(
            step=order.step, generation=order.generation, shard=shard, shards=order.of
        )
        held = [b for _, b in self._buffers.get(rank, ()) if b.is_sealed and b.step == order.step]
        if not held:
            error = f"there is no snapshot of rank {rank} after step {order.step}"
            return msgspec.structs.replace(part, error=error)
        try:
            held[0].verify()
        except CorruptError as corrupt:
            return msgspec.structs.replace(part, error=str(corrupt))
        return self._write_part(part, held[0])

    def _write(
        self, what: protocol.SnapshotTaken | protocol.Dump, buffer: SnapshotBuffer
    ) -> protocol.CheckpointWritten:
        """Write and commit a checkpoint of one file."""
        # Data-parallel ranks hold the same state: one file serves them all.
        part = Part(chunks=[buffer.file], ranks=tuple(range(self._spec.world_size)))
        started = time.monotonic()
        try:
            manifest = self._manifest(what, _position(buffer))
            written = self._store.write(manifest, {state_file(0): part})
        except CheckpointError as error:
            return protocol.CheckpointWritten(step=what.step, error=str(error))
        return protocol.CheckpointWritten(
            step=what.step,
            path=str(written.path),
            bytes=written.bytes,
            seconds=time.monotonic() - started,
        )

    def _write_part(
        self, what: protocol.SnapshotTaken | protocol.PartWritten, buffer: SnapshotBuffer
    ) -> protocol.PartWritten:
        """Write one shard; the coordinator has the checkpoint committed when it hears of all."""
        done = protocol.PartWritten(
            step=what.step, generation=what.generation, shard=what.shard, shards=what.shards
        )
        part = Part(chunks=[buffer.file], ranks=())  # whose it is, the coordinator knows
        started = time.monotonic()
        try:
            name = state_file(what.shard)
            position = _position(buffer)
            entry = self._store.write_part(what.step, what.generation, name, part)
        except (CheckpointError, CorruptError) as error:  # it may have been forgotten meanwhile
            return msgspec.structs.replace(done, error=str(error))
        took_s = time.monotonic() - started
        return msgspec.structs.replace(done, file=entry, position=position, seconds=took_s)

    def _commit_now(self, order: protocol.Commit) -> protocol.CheckpointWritten:
        done = protocol.CheckpointWritten(
            step=order.step, generation=order.generation, last_words=order.last_words
        )
        started = time.monotonic()
        try:
            manifest = self._manifest(order, order.position)
            written = self._store.commit(msgspec.structs.replace(manifest, files=order.files))
        except CheckpointError as error:
            return msgspec.structs.replace(done, error=str(error))
        return msgspec.structs.replace(
            done,
            path=str(written.path),
            bytes=written.bytes,
            seconds=order.seconds + time.monotonic() - started,
            shards=len(order.files),
        )

    def _manifest(
        self, what: protocol.SnapshotTaken | protocol.Dump | protocol.Commit, position: str
    ) -> Manifest:
        return Manifest(
            job_id=self._spec.job_id,
            step=what.step,
            generation=what.generation,
            world_size=self._spec.world_size,
            framework="torch",
            data_position=msgspec.json.decode(position),
            created=time.time(),
            writer=f"{socket.gethostname()}:{os.getpid()}",
            rekindle=__version__,
        )

    async def finish(self) -> None:
        """Wait for what is being sealed or written; a finished job keeps its last checkpoint."""
        while self._jobs:
            await asyncio.wait(list(self._jobs))

    async def close(self) -> None:
        """Give the memory back, once what is under way is done."""
        await self.finish()
        for rank in list(self._buffers):
            await self._close(self._buffers.pop(rank), set())
        self._seals.shutdown()
        self._writes.shutdown()

    async def _close(
        self, pair: list[tuple[int, SnapshotBuffer]], users: set[asyncio.Task[None]]
    ) -> None:
        """Close two buffers when those who may still read them are done."""
        if users:
            await asyncio.wait(users)
        for fd, buffer in pair:
            buffer.close()
            os.close(fd)


def _position(buffer: SnapshotBuffer) -> str:
    return read_header(buffer.file).metadata.get(METADATA_POSITION, "{}")


def _seal(buffer: SnapshotBuffer, step: int) -> bool:
    """Seal the snapshot of `step` and keep the buffer locked; False: another is in its place."""
    buffer.lock(write=False, wait=True)
    if buffer.step != step:
        buffer.unlock()
        return False
    buffer.seal()
    return True
