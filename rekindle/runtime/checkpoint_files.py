"""An agent's snapshots on their way into the store: as a checkpoint, or as one shard of it.

Whoever calls does so in a thread of its own: a store may be slow.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from rekindle import __version__
from rekindle.checkpoints.directory import DirectoryStore, Part
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.manifest import Manifest
from rekindle.errors import CheckpointError
from rekindle.recovery.plan import Made
from rekindle.runtime import protocol
from rekindle.runtime.snapshot import SnapshotBuffer
from rekindle.runtime.spec import JobSpec

METADATA_POSITION = "data_position"  # key of the snapshot's metadata, a JSON object


def state_file(shard: int) -> str:
    """Return the name of a checkpoint's file with this shard; of a whole state it is shard 0."""
    return f"state-{shard:05d}.safetensors"


class CheckpointFiles:
    """Writes what buffers hold that nobody changes meanwhile, and says how it came out."""

    def __init__(self, spec: JobSpec, store: DirectoryStore) -> None:
        self._spec = spec
        self._store = store

    def write(self, made: Made, buffer: SnapshotBuffer) -> protocol.CheckpointWritten:
        """Write and commit a checkpoint of one file."""
        # Data-parallel ranks hold the same state: one file serves them all.
        part = Part(chunks=[buffer.file], ranks=tuple(range(self._spec.world_size)))
        step, generation = made
        done = protocol.CheckpointWritten(step=step, generation=generation)
        started = time.monotonic()
        try:
            manifest = self._manifest(made, _position(buffer))
            written = self._store.write(manifest, {state_file(0): part})
        except CheckpointError as error:  # it may have been forgotten meanwhile
            return msgspec.structs.replace(done, error=str(error))
        return msgspec.structs.replace(
            done,
            path=str(written.path),
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
            position = _position(buffer)
            entry = self._store.write_part(step, generation, state_file(shard), part)
        except CheckpointError as error:  # it may have been forgotten meanwhile
            return msgspec.structs.replace(done, error=str(error))
        took_s = time.monotonic() - started
        return msgspec.structs.replace(done, file=entry, position=position, seconds=took_s)

    def commit(self, order: protocol.Commit) -> protocol.CheckpointWritten:
        """Make the checkpoint valid whose shards are all written."""
        done = protocol.CheckpointWritten(
            step=order.step, generation=order.generation, last_words=order.last_words
        )
        started = time.monotonic()
        try:
            manifest = self._manifest((order.step, order.generation), order.position)
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

    def _manifest(self, made: Made, position: str) -> Manifest:
        step, generation = made
        return Manifest(
            job_id=self._spec.job_id,
            step=step,
            generation=generation,
            world_size=self._spec.world_size,
            framework="torch",
            data_position=msgspec.json.decode(position),
            created=time.time(),
            writer=f"{socket.gethostname()}:{os.getpid()}",
            rekindle=__version__,
        )


def _position(buffer: SnapshotBuffer) -> str:
    return read_header(buffer.file).metadata.get(METADATA_POSITION, "{}")
