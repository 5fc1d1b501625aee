"""What every store of checkpoints does, whatever it is made of.

A checkpoint is one place with plain safetensors files and a manifest. The manifest is written last:
without it the checkpoint does not exist. Nothing that is committed is ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.format import Bytes, checksum
from rekindle.checkpoints.manifest import FileEntry, Manifest, encode
from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention
from rekindle.errors import CheckpointError

L = TypeVar("L", bound=Collection[object])


class CheckpointFile(msgspec.Struct, frozen=True):
    """What one file of a checkpoint is to hold, and the ranks whose state that is.

    The chunks may not change until the write has returned. told: of bytes as they are written, or
    found to be there.
    """

    chunks: Sequence[Bytes]
    ranks: tuple[int, ...]
    told: Callable[[int], None] = lambda _: None


class Written(msgspec.Struct, frozen=True):
    """A committed checkpoint, its size in bytes without the manifest.

    location: as people and tools name it. existed: it had been committed before; nothing was
    written.
    """

    location: str
    bytes: int
    existed: bool


class Checkpoint(Protocol):
    """A checkpoint that was found; newest() has proved all its bytes, find() has read none."""

    @property
    def location(self) -> str:
        """As people and tools name it."""

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""

    def read(self, name: str) -> memoryview:
        """The bytes of this file, in private memory; they were verified there.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """The bytes of this file from `begin` to `end` as they lie there; nothing is verified.

        They are fewer if the file ends before.
        Raises MissingError, CorruptError if it is no plain file, CheckpointError if unreadable.
        """

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view, of bytes, with this file's bytes from `begin` on; they are verified.

        Raises CorruptError if they are not what was written, and the view then holds anything;
        CheckpointError if unreadable, or if the file has no such bytes.
        """


class SkippedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that cannot be used, and why."""

    location: str
    reason: str


class NewestCheckpoint(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, if any, and the newer ones that were passed over for it."""

    checkpoint: Checkpoint | None
    passed_over: tuple[SkippedCheckpoint, ...]


def newest_of(
    list_all: Callable[[], L], first_valid: Callable[[L], NewestCheckpoint]
) -> NewestCheckpoint:
    """Return the newest valid checkpoint of a list.

    The list is made again where all in it were pruned while they were read: a newer one has been
    committed then.
    """
    listed = list_all()
    while True:
        found = first_valid(listed)
        again = list_all()
        if found.checkpoint or set(listed) <= set(again):
            return found
        listed = again


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint's place, by its manifest and the sizes of its files; their bytes are not read.

    manifest: None if there is none that can be read. reason: why it cannot be used; empty: nothing
    is wrong as far as can be seen. unfinished: no manifest was written yet, or ever. newer: a later
    version of Rekindle wrote it; it is left alone.
    """

    location: str
    step: int
    generation: int
    manifest: Manifest | None
    reason: str = ""
    unfinished: bool = False
    newer: bool = False


class CheckpointStore(Protocol):
    """All checkpoints of one job, in one place.

    One process writes a checkpoint alone, with write(); or several, on any machines that reach the
    place, write one file each with write_part(), and when all are written one process makes them a
    checkpoint with commit().
    """

    @property
    def location(self) -> str:
        """As people and tools name it: an absolute path, or a URL without any secret."""

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint; manifest.files is filled in from the parts (file names).

        A valid checkpoint of the same step and generation is left as it is.
        Raises CheckpointError, and no such checkpoint exists, if it cannot be written.
        """

    def write_part(self, step: int, generation: int, name: str, part: CheckpointFile) -> FileEntry:
        """Write one file of a checkpoint that counts once it is committed, with its other parts.

        Raises CheckpointError, with the others' parts untouched, if it cannot be written.
        """

    def commit(self, manifest: Manifest) -> Written:
        """Make a checkpoint of the parts that manifest.files names, as write_part() returned them.

        Raises CheckpointError, with all parts left as they are, if one is missing or not what was
        written, or if the manifest cannot be written.
        """

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """The newest checkpoint (highest step, then generation) that is valid in every byte.

        at_most: the highest step that is wanted. Raises CheckpointError: the store cannot be read.
        """

    def find(self, step: int, generation: int) -> Checkpoint | None:
        """The checkpoint of this step and generation, if it has all its files in their sizes.

        Raises CheckpointError: the store cannot be read.
        """

    def keys(self, *, at_most: Key | None = None) -> list[Key]:
        """Step and generation of all finished checkpoints, newest first; nothing in them is read.

        at_most: the newest that is wanted. Raises CheckpointError: the store cannot be read.
        """

    def survey(self) -> list[CheckpointInfo]:
        """All that bears a checkpoint's name, newest first, whether it can be used or not.

        Raises CheckpointError: the store cannot be read.
        """

    def at(self, manifest: Manifest) -> Checkpoint:
        """The checkpoint of this manifest, whatever lies in its place here; nothing is read."""

    def prune(self, retention: Retention) -> tuple[Key, ...]:
        """Remove what the retention does not keep, and say which, newest first.

        Never the newest valid checkpoint, nor one that is pinned. What killed writers left goes
        too, if a newer checkpoint is finished, and pins that have expired or keep nothing.
        Raises CheckpointError if one cannot be removed.
        """

    def pin(self, pin: Pin) -> bool:
        """Keep a checkpoint from being pruned; False, and nothing is changed: it is not there.

        Once this has returned True, nobody prunes the checkpoint while the pin holds.
        Raises CheckpointError: the store cannot be written.
        """

    def unpin(self, pin: Pin) -> None:
        """Remove a pin; one that is not there is no error. Raises CheckpointError."""

    def pins(self) -> list[Pin]:
        """All pins, also those that have expired. Raises CheckpointError: it cannot be read."""


def existing(location: str, there: Manifest, job_id: str) -> Written:
    """The checkpoint that was found in its place; CheckpointError if it is another job's."""
    if there.job_id != job_id:
        raise CheckpointError(
            f"{location} is a checkpoint of job {there.job_id!r}: "
            f"give job {job_id!r} a place of its own"
        )
    return Written(location, bytes_of(there), existed=True)


def check_writable(manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> None:
    """Raise CheckpointError, before anything is written, if the manifest will be impossible."""
    nothing = checksum([])
    files = tuple(
        FileEntry(name=name, bytes=0, checksum=nothing, ranks=part.ranks)
        for name, part in parts.items()
    )
    encode(msgspec.structs.replace(manifest, files=files))


def bytes_of(manifest: Manifest) -> int:
    """Bytes of all files without the manifest."""
    return sum(entry.bytes for entry in manifest.files)
