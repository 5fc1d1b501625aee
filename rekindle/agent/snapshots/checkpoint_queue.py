"""The checkpoints of one node: their queue, and the writer of snapshots into the store.

No rank waits for the store. The store holds at most one of a rank's buffers: the one that it writes
or will write. While the store is busy, the next due snapshot is not held. The node writes it later
if the rank has not overwritten it. Otherwise, or when a newer one is due, the node skips it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from rekindle import names
from rekindle.agent.threads import in_pool
from rekindle.checkpoints.format import (
    METADATA_METRICS,
    METADATA_ORIGIN,
    METADATA_POSITION,
    read_header,
    state_file,
)
from rekindle.checkpoints.manifest import Manifest, StateOrigin
from rekindle.checkpoints.store import CheckpointFile, CheckpointStore
from rekindle.errors import CheckpointError
from rekindle.job.spec import JobSpec
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId

Start = Callable[[Coroutine[None, None, None]], object]


class CheckpointFiles:
    """Writes the contents of locked buffers into the store, and returns the results."""

    def __init__(self, spec: JobSpec, store: CheckpointStore) -> None:
        self._spec = spec
        self._store = store
        self._metrics: dict[str, float] = {}  # metrics of the last commit
        self._amiss = ""  # the last reported problem

    def write(self, state: StateId, buffer: SnapshotBuffer) -> protocol.CheckpointWritten:
        """Write and commit a checkpoint of one file."""
        # Data-parallel ranks hold the same state, so one file serves all of them.
        part = CheckpointFile(chunks=[buffer.file], ranks=tuple(range(self._spec.world_size)))
        step, generation = state
        done = protocol.CheckpointWritten(step=step, generation=generation)
        started = time.monotonic()
        try:
            manifest = self._manifest(state, _notes_of(buffer))
            written = self._store.write(manifest, {state_file(0): part})
        except CheckpointError as error:  # the agent may have dropped the snapshot
            return msgspec.structs.replace(done, error=str(error))
        return msgspec.structs.replace(
            done,
            path=written.location,
            bytes=written.bytes,
            seconds=time.monotonic() - started,
        )

    def write_part(
        self, state: StateId, shard: int, shards: int, buffer: SnapshotBuffer
    ) -> protocol.ShardWritten:
        """Write one shard; the coordinator orders the commit when it knows of all shards."""
        step, generation = state
        done = protocol.ShardWritten(step=step, generation=generation, shard=shard, shards=shards)
        part = CheckpointFile(chunks=[buffer.file], ranks=())  # the coordinator adds the ranks
        started = time.monotonic()
        try:
            notes = _notes_of(buffer)
            entry = self._store.write_part(step, generation, state_file(shard), part)
        except CheckpointError as error:  # the agent may have dropped the snapshot
            return msgspec.structs.replace(done, error=str(error))
        took_s = time.monotonic() - started
        return msgspec.structs.replace(
            done,
            file=entry,
            position=notes.position,
            origin=notes.origin,
            metrics=notes.metrics,
            seconds=took_s,
        )

    def commit(self, order: protocol.Commit) -> protocol.CheckpointWritten:
        """Commit the checkpoint whose shards are all in the store."""
        done = protocol.CheckpointWritten(
            step=order.step, generation=order.generation, final=order.final
        )
        started = time.monotonic()
        try:
            state = StateId(order.step, order.generation)
            notes = _Notes(order.position, order.origin, order.metrics)
            manifest = self._manifest(state, notes)
            written = self._store.commit(msgspec.structs.replace(manifest, files=order.files))
        except CheckpointError as error:
            return msgspec.structs.replace(done, error=str(error))
        return msgspec.structs.replace(
            done,
            path=written.location,
            bytes=written.bytes,
            seconds=order.seconds + time.monotonic() - started,
            stall_s=order.stall_s,
            shards=len(order.files),
        )

    def prune(self) -> protocol.Pruned | None:
        """Remove the checkpoints that the job's retention does not keep; None: there is no news.

        The result reports a problem once, not after every checkpoint.
        """
        keep, amiss = self._spec.keep, ""
        removed: tuple[StateId, ...] = ()
        if keep.keeps_all:
            return None
        if keep.metric and keep.metric not in self._metrics:
            known = ", ".join(sorted(self._metrics)) or "nothing"
            amiss = (
                f"the script did not log {keep.metric} in the step of the newest checkpoint (it "
                f"logged {known}); retention never counts such a checkpoint among the best"
            )
        try:
            removed = self._store.prune(keep)
        except CheckpointError as error:
            amiss = f"Rekindle could not remove old checkpoints: {error}"
        news, self._amiss = "" if amiss == self._amiss else amiss, amiss
        return protocol.Pruned(removed=removed, error=news) if removed or news else None

    def _manifest(self, state: StateId, notes: _Notes) -> Manifest:
        step, generation = state
        self._metrics = notes.metrics
        return Manifest(
            job_id=self._spec.job_id,
            step=step,
            generation=generation,
            world_size=self._spec.world_size,
            framework=self._spec.framework.value,
            origin=notes.origin,
            data_position=msgspec.json.decode(notes.position),
            metrics=notes.metrics,
            created=time.time(),
            writer=f"{socket.gethostname()}:{os.getpid()}",
            rekindle=names.VERSION,
        )


class _Notes(NamedTuple):
    """The rank's notes about its state: the data's position as JSON, its origin, its metrics."""

    position: str
    origin: StateOrigin
    metrics: dict[str, float]


def _notes_of(buffer: SnapshotBuffer) -> _Notes:
    metadata = read_header(buffer.file).metadata
    return _Notes(
        metadata.get(METADATA_POSITION, "{}"),
        msgspec.json.decode(metadata.get(METADATA_ORIGIN, "{}"), type=StateOrigin),
        msgspec.json.decode(metadata.get(METADATA_METRICS, "{}"), type=dict[str, float]),
    )


class DueSnapshot:
    """A snapshot that becomes a checkpoint."""

    def __init__(self, taken: protocol.SnapshotTaken, fd: int) -> None:
        self.taken = taken
        self.state = StateId(taken.step, taken.generation)
        self.buffer = SnapshotBuffer(fd)  # with its own locks
        self._held = False

    def hold(self) -> bool:
        """Prevent the rank from overwriting it; False: the rank has done so, or is about to."""
        self._held = self._held or self.buffer.lock(write=False)
        return self._held and self.is_there

    @property
    def is_there(self) -> bool:
        """Whether the buffer still has that state, with its seal."""
        return self.buffer.state == self.state and self.buffer.is_sealed

    def close(self) -> None:
        """Release the buffer for the rank."""
        self.buffer.close()


class DueCheckpoints:
    """The due checkpoints of one node. start: begins work that the agent completes."""

    def __init__(
        self,
        files: CheckpointFiles,
        writes: ThreadPoolExecutor,
        tell: Callable[[protocol.Message], None],
        start: Start,
    ) -> None:
        self._files = files
        self._writes = writes
        self._tell = tell
        self._start = start
        self._writing: StateId | None = None  # the state, not sharded, that the store is taking now
        self._next: DueSnapshot | None = None  # the next one to write
        self._offered: dict[int, DueSnapshot] = {}  # by rank: the newest of its shard
        # By rank: the snapshot whose shard the store is taking now.
        self._busy: dict[int, protocol.SnapshotTaken] = {}

    def due(self, taken: protocol.SnapshotTaken, fd: int) -> None:
        """Add a sealed snapshot that becomes a checkpoint; the caller holds its buffer."""
        snapshot = DueSnapshot(taken, fd)
        if taken.shards == 1:
            self._line_up(snapshot)
        else:
            self._offer(snapshot)

    # ---- a state that all ranks hold: only this node writes it

    def _line_up(self, snapshot: DueSnapshot) -> None:
        before, self._next = self._next, snapshot
        if before is not None:
            self._leave_out(before)
        if self._writing is None:
            snapshot.hold()
            self._writing = snapshot.state
            self._start(self._write_in_turn())

    async def _write_in_turn(self) -> None:
        try:
            while self._next is not None:
                snapshot, self._next = self._next, None
                if not snapshot.hold():
                    self._leave_out(snapshot)
                    continue
                self._writing = snapshot.state
                try:
                    write = self._files.write
                    written = await in_pool(self._writes, write, snapshot.state, snapshot.buffer)
                    if not written.error or snapshot.is_there:  # otherwise the agent dropped it
                        self._tell(msgspec.structs.replace(written, stall_s=snapshot.taken.stall_s))
                finally:
                    snapshot.close()
                await self.prune(written)
        finally:
            self._writing = None

    def _leave_out(self, snapshot: DueSnapshot) -> None:
        snapshot.close()
        self._tell(_left_out(snapshot.state, 1, self._writing))

    # ---- shards: the coordinator knows when all of them are ready

    def _offer(self, snapshot: DueSnapshot) -> None:
        taken = snapshot.taken
        if before := self._offered.pop(taken.rank, None):
            before.close()
        if taken.rank not in self._busy:
            snapshot.hold()
        self._offered[taken.rank] = snapshot
        self._tell(
            protocol.ShardReady(
                step=taken.step,
                generation=taken.generation,
                rank=taken.rank,
                shard=taken.shard,
                shards=taken.shards,
            )
        )

    def write_parts(self, order: protocol.WriteShards) -> None:
        """Write the shards of a checkpoint that all nodes write now."""
        state = StateId(order.step, order.generation)
        found = [each for rank in order.shards.values() if (each := self._offered.get(rank))]
        busy = [self._busy[rank] for rank in order.shards.values() if rank in self._busy]
        there = len(found) == len(order.shards) and all(each.state == state for each in found)
        if busy or not there or not all(each.hold() for each in found):
            for each in found:
                if each.state == state:
                    self._offered.pop(each.taken.rank).close()
            taken = busy[0] if busy else None
            writing = StateId(taken.step, taken.generation) if taken else None
            self._tell(_left_out(state, order.of, writing))
            return
        for snapshot in found:
            rank = snapshot.taken.rank
            self._busy[rank] = snapshot.taken
            del self._offered[rank]
            self._start(self._write_part(snapshot))

    async def _write_part(self, snapshot: DueSnapshot) -> None:
        taken = snapshot.taken
        what = snapshot.state, taken.shard, taken.shards, snapshot.buffer
        try:
            written = await in_pool(self._writes, self._files.write_part, *what)
            if not written.error or snapshot.is_there:
                self._tell(msgspec.structs.replace(written, stall_s=taken.stall_s))
        except Exception as error:  # a bug, which must be visible; the coordinator must not wait
            self._tell(_failed_shard(taken, f"{type(error).__name__}: {error}"))
            raise
        finally:
            del self._busy[taken.rank]
            snapshot.close()

    def give_up(self, error: str) -> None:
        """Report what the store is taking now as failed. The coordinator no longer waits for it."""
        if self._writing is not None:
            step, generation = self._writing
            self._tell(protocol.CheckpointWritten(step=step, generation=generation, error=error))
        for taken in self._busy.values():
            self._tell(_failed_shard(taken, error))

    def formed(self) -> None:
        """Start a generation: drop the shards of earlier ones whose writing has not started."""
        for snapshot in self._offered.values():
            snapshot.close()
        self._offered = {}

    async def prune(self, written: protocol.CheckpointWritten) -> None:
        """Remove checkpoints that retention no longer keeps, after a successful write."""
        if written.error:
            return
        pruned = await in_pool(self._writes, self._files.prune)
        if pruned is not None:
            self._tell(pruned)


def _failed_shard(taken: protocol.SnapshotTaken, error: str) -> protocol.ShardWritten:
    return protocol.ShardWritten(
        step=taken.step,
        generation=taken.generation,
        shard=taken.shard,
        shards=taken.shards,
        error=error,
    )


def _left_out(state: StateId, shards: int, busy: StateId | None) -> protocol.WriteLeftOut:
    step, generation = state
    reason = (
        f"the store was busy with the checkpoint of step {busy[0]}"
        if busy
        else "a newer snapshot replaced its snapshot before all shards were written"
    )
    return protocol.WriteLeftOut(step=step, generation=generation, shards=shards, reason=reason)
