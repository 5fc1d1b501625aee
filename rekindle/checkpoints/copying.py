"""A checkpoint from one store into another: whole and proven, or not at all.

What an earlier copy has left off at is gone on with: a file that lies there intact is not sent
again. Doing it twice writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec

from rekindle.checkpoints.manifest import FileEntry, identity
from rekindle.checkpoints.store import Checkpoint, Part, Store, Written, existing
from rekindle.checkpoints.verifying import PIECE, UNREADABLE, Told, check_file, verify
from rekindle.errors import CheckpointError, CorruptError


def copy(checkpoint: Checkpoint, to: Store, told: Told) -> Written:
    """Copy a checkpoint that was verified; told of its bytes as they are copied, or found there.

    Raises CorruptError: it has changed since. CheckpointError: it cannot be read or written, or
    another checkpoint is in its place.
    """
    manifest = checkpoint.manifest
    place = (manifest.step, manifest.generation)
    there = to.find(*place)
    if there is not None:
        existing(there.location, there.manifest, manifest.job_id)
        if identity(there.manifest) != identity(manifest):
            raise CheckpointError(
                f"{there.location} is another checkpoint of the same step and generation than "
                f"{checkpoint.location}: copy to another place"
            )
    # Each store has its own names for what holds a file.
    files = [msgspec.structs.replace(entry, stored="") for entry in manifest.files]
    target = to.at(msgspec.structs.replace(manifest, files=tuple(files)))
    for index, entry in enumerate(files):
        if _is_there(target, entry):
            told(entry.bytes)
            continue
        part = Part(_Chunks(checkpoint, entry), entry.ranks, told)
        files[index] = written = to.write_part(*place, entry.name, part)
        if (written.bytes, written.checksum) != (entry.bytes, entry.checksum):
            raise CorruptError(
                f"{entry.name} of {checkpoint.location} has changed while it was copied; "
                "nothing was committed"
            )
    return to.commit(msgspec.structs.replace(manifest, files=tuple(files)))


def check_intact(checkpoint: Checkpoint, told: Told) -> None:
    """Read all of it.

    Raises CorruptError, which names what is wrong; CheckpointError if some of it cannot be read,
    which says nothing of what is there.
    """
    damages = verify(checkpoint, told)
    for each in damages:
        if each.what == UNREADABLE:
            raise CheckpointError(f"{each.file} of {checkpoint.location}: {each.where}")
    if damages:
        found = "; ".join(f"{each.file} is {each.what}: {each.where}" for each in damages)
        raise CorruptError(f"{checkpoint.location} is damaged: {found}")


def _is_there(checkpoint: Checkpoint, entry: FileEntry) -> bool:
    """Whether the file lies there, intact, by its size first: most often there is none."""
    try:
        last = checkpoint.read_range(entry.name, max(0, entry.bytes - 1), entry.bytes)
    except CorruptError:
        return False
    whole = len(last) == min(1, entry.bytes)
    return whole and check_file(checkpoint, entry, lambda _: None) is None


class _Chunks(Sequence[memoryview]):
    """A file's bytes as the chunks of a part, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, entry: FileEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self._begins = range(0, entry.bytes, PIECE)

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        begin = self._begins[index]
        end = min(begin + PIECE, self._entry.bytes)
        return self._checkpoint.read_range(self._entry.name, begin, end)
