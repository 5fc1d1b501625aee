"""The snapshots of one node: the agent's buffers, their seals, and their way into the store."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from rekindle import __version__
from rekindle.checkpoints.directory import DirectoryStore, Part
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.manifest import Manifest
from rekindle.errors import CheckpointError, CorruptError
from rekindle.names import OFFERS
from rekindle.runtime import protocol
from rekindle.runtime.snapshot import BUFFERS, SnapshotBuffer
from rekindle.runtime.spec import JobSpec

METADATA_POSITION = "data_position"  # key of the snapshot's metadata, a JSON object
STATE_FILE = "state-00000.safetensors"


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

    def room(self, rank: int, data_bytes: int) -> tuple[protocol.SnapshotBuffers, list[int]]:
        """Answer a rank's SnapshotRoom: its two buffers, made anew if they are too small."""
        held = self._buffers.get(rank, [])
        if data_bytes and held and len(held[0][1].data) < data_bytes:
            self._start(self._close(self._buffers.pop(rank), set(self._jobs)))
            held = []
        if data_bytes and not held:
            try:
                held = [self._make(rank, index, data_bytes) for index in range(BUFFERS)]
            except OSError as error:
                text = f"no memory for two snapshots of {data_bytes} bytes: {error.strerror}"
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
                work = functools.partial(self._write, message.generation, message.step, buffer)
                written = await loop.run_in_executor(self._writes, work)
                self._tell(written)
        finally:
            buffer.unlock()

    def _sealed(self, rank: int) -> None:
        sealed = [buffer for _, buffer in self._buffers[rank] if buffer.is_sealed]
        self.steps[rank] = tuple(buffer.step or 0 for buffer in sealed)
        self._send(protocol.Snapshots(steps={rank: self.steps[rank]}))

    def _tell(self, written: protocol.CheckpointWritten) -> None:
        if not written.error:
            self.checkpoints = (written.step, *self.checkpoints)[:OFFERS]
        self._send(written)

    def dump(self, order: protocol.Dump) -> None:
        """Write the newest snapshot that is intact: last words."""
        self._start(self._dump(order, set(self._jobs)))

    async def _dump(self, order: protocol.Dump, earlier: set[asyncio.Task[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)  # what is being sealed may be newer than what is asked for
        loop = asyncio.get_running_loop()
        written = await loop.run_in_executor(self._writes, self._write_newest, order)
        self._tell(msgspec.structs.replace(written, last_words=True))

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
            return self._write(order.generation, step, buffer)
        return protocol.CheckpointWritten(step=order.step, error=error)

    def _write(
        self, generation: int, step: int, buffer: SnapshotBuffer
    ) -> protocol.CheckpointWritten:
        started = time.monotonic()
        position = read_header(buffer.file).metadata.get(METADATA_POSITION, "{}")
        try:
            # Data-parallel ranks hold the same state: one file serves them all.
            everyone = tuple(range(self._spec.world_size))
            written = self._store.write(
                self._manifest(generation, step, msgspec.json.decode(position)),
                {STATE_FILE: Part(chunks=[buffer.file], ranks=everyone)},
            )
        except CheckpointError as error:
            return protocol.CheckpointWritten(step=step, error=str(error))
        return protocol.CheckpointWritten(
            step=step,
            path=str(written.path),
            bytes=written.bytes,
            seconds=time.monotonic() - started,
        )

    def _manifest(self, generation: int, step: int, position: dict[str, Any]) -> Manifest:
        return Manifest(
            job_id=self._spec.job_id,
            step=step,
            generation=generation,
            world_size=self._spec.world_size,
            framework="torch",
            data_position=position,
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


def _seal(buffer: SnapshotBuffer, step: int) -> bool:
    """Seal the snapshot of `step` and keep the buffer locked; False: another is in its place."""
    buffer.lock(write=False, wait=True)
    if buffer.step != step:
        buffer.unlock()
        return False
    buffer.seal()
    return True
