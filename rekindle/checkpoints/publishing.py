"""Publishing a checkpoint: a verified copy with a reference that stays, made once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.files import explained
from rekindle.checkpoints.format import checksum
from rekindle.checkpoints.manifest import MANIFEST_FILE
from rekindle.checkpoints.store import Checkpoint, Part


class Published(msgspec.Struct, frozen=True):
    """A published checkpoint.

    reference: its path and the checksum of its manifest, which holds those of all files: whoever
    has it can tell that nothing was changed since. existed: it had been published before.
    """

    reference: str
    path: Path
    step: int
    bytes: int
    existed: bool


def publish(checkpoint: Checkpoint, to: Path) -> Published:
    """Copy a checkpoint to `to`/<job id>; every byte is verified on the way.

    Doing it again gives the same reference, and writes nothing. Raises CorruptError: the checkpoint
    is not what was written. Raises CheckpointError: it cannot be read or copied.
    """
    manifest = checkpoint.manifest
    store = DirectoryStore(to / manifest.job_id)
    place = (manifest.step, manifest.generation)
    there = store.newest(at_most=manifest.step).checkpoint
    files = manifest.files
    if there is None or (there.manifest.step, there.manifest.generation) != place:
        # One at a time: all together may be more than the memory.
        files = tuple(
            store.write_part(*place, entry.name, Part([checkpoint.read(entry.name)], entry.ranks))
            for entry in manifest.files
        )
    written = store.commit(msgspec.structs.replace(manifest, files=files))
    path = Path(written.location)
    with explained("read", path):
        digest = checksum([(path / MANIFEST_FILE).read_bytes()])
    return Published(
        reference=f"{path}#{digest}",
        path=path,
        step=manifest.step,
        bytes=written.bytes,
        existed=written.existed,
    )
