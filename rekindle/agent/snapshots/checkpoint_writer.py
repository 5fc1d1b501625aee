"""An agent's snapshots on their way into the store: as a checkpoint, or as one shard of it.

Whoever calls does so in a thread of its own: a store may be slow.
"""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

import msgspec

from rekindle import __version__
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.manifest import Manifest, Origin
from rekindle.checkpoints.state_files import (
    METADATA_METRICS,
    METADATA_ORIGIN,
    METADATA_POSITION,
    state_file,
)
from rekindle.checkpoints.store import Part, Store
from rekindle.errors import CheckpointError
from rekindle.job.spec import JobSpec
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.recovery.policy.plan import Made


class CheckpointFiles:
    """Writes what buffers hold that nobody changes meanwhile, and says how it came out."""

    def __init__(self, spec: JobSpec, store: Store) -> None:
        self._spec = spec
        self._store = store
        self._metrics: dict[str, float] = {}  # of what was committed last
        self._amiss = ""  # as was said last

    def write(self, made: Made, buffer: SnapshotBuffer) -> protocol.CheckpointWritten:
        """Write and commit a checkpoint of one file."""
        # Data-parallel ranks hold the same state: one file serves them all.
        part = Part(chunks=[buffer.file], ranks=tuple(range(self._spec.world_size)))
        step, generation = made
        done = protocol.CheckpointWritten(step=step, generation=generation)
        started = time.monotonic()
        try:
            manifest = self._manifest(made, _said(buffer))
            written = self._store.write(manifest, {state_file(0): part})
        except CheckpointError as error:  # it may have been forgotten meanwhile
            return msgspec.structs.replace(done, error=str(error))
        return msgspec.structs.replace(
            done,
            path=written.location,
            bytes=written.bytes,
            seconds=time.monotonic() - started,
        )

    def write_part(
        self, made: Made, shard: int, shards: int, buffer: SnapshotBuffer
    ) -> protocol.PartWritten:
        """Write one shard; the coordinator has the checkpoint committed when it hears of all."""
        step, generation = made
        done = protocol.PartWritten(step=step, generation=generation, shard=shard, shards=shards)
        part = Part(chunks=[buffer.file], ranks=())  # whose it is, the coordinator knows
        started = time.monotonic()
        try:
            said = _said(buffer)
            entry = self._store.write_part(step, generation, state_file(shard), part)
        except CheckpointError as error:  # it may have been forgotten meanwhile
            return msgspec.structs.replace(done, error=str(error))
        took_s = time.monotonic() - started
        return msgspec.structs.replace(
            done,
            file=entry,
            position=said.position,
            origin=said.origin,
            metrics=said.metrics,
            seconds=took_s,
        )

    def commit(self, order: protocol.Commit) -> protocol.CheckpointWritten:
        """Make the checkpoint valid whose shards are all written."""
        done = protocol.CheckpointWritten(
            step=order.step, generation=order.generation, last_words=order.last_words
        )
        started = time.monotonic()
        try:
            made = order.step, order.generation
            said = _Said(order.position, order.origin, order.metrics)
            manifest = self._manifest(made, said)
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
        """Remove what the job's retention does not keep; None: there is nothing to be told.

        What is amiss is told once, not after every checkpoint.
        """
        keep, amiss = self._spec.keep, ""
        removed: tuple[Made, ...] = ()
        if keep.keeps_all:
            return None
        if keep.metric and keep.metric not in self._metrics:
            known = ", ".join(sorted(self._metrics)) or "nothing"
            amiss = (
                f"the step of the newest checkpoint has not logged {keep.metric} (but {known}): "
                "such checkpoints are never among the best"
            )
        try:
            removed = self._store.prune(keep)
        except CheckpointError as error:
            amiss = f"checkpoints that need not be kept could not be removed: {error}"
        news, self._amiss = "" if amiss == self._amiss else amiss, amiss
        return protocol.Pruned(removed=removed, error=news) if removed or news else None

    def _manifest(self, made: Made, said: _Said) -> Manifest:
        step, generation = made
        self._metrics = said.metrics
        return Manifest(
            job_id=self._spec.job_id,
            step=step,
            generation=generation,
            world_size=self._spec.world_size,
            framework=self._spec.framework.value,
            origin=said.origin,
            data_position=msgspec.json.decode(said.position),
            metrics=said.metrics,
            created=time.time(),
            writer=f"{socket.gethostname()}:{os.getpid()}",
            rekindle=__version__,
        )


class _Said(NamedTuple):
    """What a rank said of its state: the data's position as JSON, its origin, its metrics."""

    position: str
    origin: Origin
    metrics: dict[str, float]


def _said(buffer: SnapshotBuffer) -> _Said:
    metadata = read_header(buffer.file).metadata
    return _Said(
        metadata.get(METADATA_POSITION, "{}"),
        msgspec.json.decode(metadata.get(METADATA_ORIGIN, "{}"), type=Origin),
        msgspec.json.decode(metadata.get(METADATA_METRICS, "{}"), type=dict[str, float]),
    )
