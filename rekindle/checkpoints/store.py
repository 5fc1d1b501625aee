"""The interface of every store of checkpoints.

A checkpoint is one place with plain safetensors files and a manifest. A writer writes the manifest
last: without it the checkpoint does not exist. No process changes a committed checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from rekindle.checkpoints.checkpoint_path import entry_of, name_of
from rekindle.checkpoints.files import private_memory
from rekindle.checkpoints.format import Bytes, checksum
from rekindle.checkpoints.manifest import FileEntry, Manifest, encode
from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention
from rekindle.errors import CheckpointError
from rekindle.states import StateId

LEASE_S: Final = 600.0  # duration of a reader's pin; the reader renews it three times as often

L = TypeVar("L", bound=Collection[object])


class CheckpointFile(msgspec.Struct, frozen=True):
    """Contents of one file of a checkpoint, and the ranks whose state it holds.

    The chunks must not change until the write has returned. on_bytes: called with the number of
    bytes that were written, or that exist already.
    """

    chunks: Sequence[Bytes]
    ranks: tuple[int, ...]
    on_bytes: Callable[[int], None] = lambda _: None


class Written(msgspec.Struct, frozen=True):
    """A committed checkpoint. bytes: its size without the manifest.

    location: as users and tools see it. existed: the checkpoint had been committed before, and
    nothing was written.
    """

    location: str
    bytes: int
    existed: bool


class Checkpoint(Protocol):
    """A checkpoint in a store. newest() has verified all its bytes, find() has not read them."""

    @property
    def location(self) -> str:
        """Return the location in the form that users and tools see."""

    @property
    def manifest(self) -> Manifest:
        """Return its manifest."""

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """Return the unverified bytes of this file from `begin` to `end`; fewer if it ends before.

        Raises MissingError, CorruptError if it is not a plain file, CheckpointError if unreadable.
        """

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view, which has bytes, with this file's verified bytes, starting at `begin`.

        Raises CorruptError if they are not what was written. The contents of the view are undefined
        then. CheckpointError if unreadable, or if the file does not have these bytes.
        """


def read_file(checkpoint: Checkpoint, name: str) -> memoryview:
    """Return the bytes of this file in private memory, verified after they were read.

    Raises CorruptError if they are not what was written, CheckpointError if unreadable.
    """
    entry = entry_of(checkpoint.location, checkpoint.manifest, name)
    memory = private_memory(entry.bytes)
    checkpoint.read_into(name, 0, memory)
    return memory


class SkippedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that cannot be used, and the reason."""

    location: str
    reason: str


class NewestCheckpoint(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, if any, and the newer checkpoints that were skipped."""

    checkpoint: Checkpoint | None
    passed_over: tuple[SkippedCheckpoint, ...]


def newest_of(
    list_all: Callable[[], L], first_valid: Callable[[L], NewestCheckpoint]
) -> NewestCheckpoint:
    """Return the newest valid checkpoint of a list.

    If no listed checkpoint is valid, and another process has pruned some of them, the function
    lists again. A newer checkpoint has been committed then.
    """
    listed = list_all()
    while True:
        found = first_valid(listed)
        again = list_all()
        if found.checkpoint or set(listed) <= set(again):
            return found
        listed = again


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint's manifest, and whether it can be used, without a look at the bytes.

    manifest: None if it is missing or unreadable. reason: why the checkpoint cannot be used; empty:
    no defect was found. unfinished: the manifest was not written.

    newer: a later version of Rekindle wrote it, so this version does not change it.
    """

    location: str
    step: int
    generation: int
    manifest: Manifest | None
    reason: str = ""
    unfinished: bool = False
    newer: bool = False

    @property
    def state(self) -> StateId:
        """Return the state that the checkpoint holds."""
        return StateId(self.step, self.generation)


class CheckpointStore(Protocol):
    """All checkpoints of one job, in one place.

    One process can write a checkpoint alone, with write(). Several processes, on any machines that
    reach the place, can each write one file with write_part(). When all files are written, one
    process commits the checkpoint with commit().
    """

    @property
    def location(self) -> str:
        """Return an absolute path, or a URL without a secret, as users and tools see it."""

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint. manifest.files is filled in from the parts (file names).

        The method does not change a valid checkpoint of the same step and generation.
        Raises CheckpointError if it cannot be written. The checkpoint does not exist then.
        """

    def write_part(self, step: int, generation: int, name: str, part: CheckpointFile) -> FileEntry:
        """Write one file of a checkpoint. The checkpoint is valid after commit().

        Raises CheckpointError if it cannot be written. The other parts are unchanged then.
        """

    def commit(self, manifest: Manifest) -> Written:
        """Commit the parts that manifest.files names, as write_part() returned them.

        Raises CheckpointError if a part is missing or not what was written, or if the manifest
        cannot be written. All parts are unchanged then.
        """

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """Return the newest checkpoint (highest step, then generation) with all bytes verified.

        at_most: the highest step that is allowed. Raises CheckpointError: the store cannot be read.
        """

    def find(self, step: int, generation: int) -> Checkpoint | None:
        """Return the checkpoint of this step and generation, or None.

        The method returns None unless all files exist with their sizes. Raises CheckpointError: the
        store cannot be read.
        """

    def keys(self, *, at_most: StateId | None = None) -> list[StateId]:
        """Return step and generation of all finished checkpoints, newest first. No file is read.

        at_most: the newest key that is allowed. Raises CheckpointError: the store cannot be read.
        """

    def survey(self) -> list[CheckpointInfo]:
        """Describe everything with a checkpoint's name, usable or not, newest first.

        Raises CheckpointError: the store cannot be read.
        """

    def at(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint of this manifest in this store. The method reads no file."""

    def prune(self, retention: Retention) -> tuple[StateId, ...]:
        """Remove the checkpoints that the retention does not keep. Return them, newest first.

        The method never removes the newest valid checkpoint or a pinned one. If a newer checkpoint
        is finished, the method also removes the files of writers that were killed. It also removes
        pins that have expired or whose checkpoint is gone.
        Raises CheckpointError if a checkpoint cannot be removed.
        """

    def pin(self, pin: Pin) -> bool:
        """Protect a checkpoint from pruning. Return False, without a change, if it does not exist.

        After this has returned True, no process prunes the checkpoint while the pin holds.
        Raises CheckpointError: the store cannot be written.
        """

    def unpin(self, pin: Pin) -> None:
        """Remove a pin. A missing pin is not an error. Raises CheckpointError."""

    def pins(self) -> list[Pin]:
        """Return all pins, also expired ones. Raises CheckpointError: they cannot be read."""


@contextlib.contextmanager
def reading(store: CheckpointStore, key: StateId, *, lease_s: float = LEASE_S) -> Iterator[None]:
    """Protect a checkpoint from pruning while this process reads it.

    If the process cannot write to the store, it reads without a pin. A pruned checkpoint then
    causes an error of the read.
    Raises CheckpointError: the checkpoint does not exist.
    """
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60]
    name = f"read-{host}-{os.getpid()}-{secrets.token_hex(4)}"
    over = threading.Event()
    pins = [Pin(key, name, _end(lease_s))]

    def renew() -> None:
        while not over.wait(lease_s / 3):
            longer = Pin(key, name, _end(lease_s))
            if longer == pins[-1]:
                continue
            pins.append(longer)
            # A failed renewal is repeated before the lease ends. A lasting failure also shows in
            # the reads.
            with contextlib.suppress(CheckpointError):
                store.pin(longer)
                store.unpin(pins.pop(0))

    try:
        there = store.pin(pins[0])
    except CheckpointError:
        yield
        return
    if not there:
        raise CheckpointError(f"{store.location} has no checkpoint {name_of(*key)}")
    renewing = threading.Thread(target=renew, name="rekindle-reading", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        for pin in pins:
            with contextlib.suppress(CheckpointError):  # the pin expires
                store.unpin(pin)


def _end(lease_s: float) -> int:
    return math.ceil(time.time() + lease_s)


def existing(location: str, there: Manifest, job_id: str) -> Written:
    """Return the checkpoint that existed. Raises CheckpointError: it belongs to another job."""
    if there.job_id != job_id:
        raise CheckpointError(
            f"{location} is a checkpoint of job {there.job_id!r}; use another location for job "
            f"{job_id!r}"
        )
    return Written(location, bytes_of(there), existed=True)


def foreign(location: str, newest: Manifest, job_id: str) -> str:
    """Return why a job must not continue from a store's newest checkpoint; empty: it may."""
    if newest.job_id == job_id:
        return ""
    return (
        f"{location} has checkpoints of job {newest.job_id!r} (step {newest.step}), and this is "
        f"job {job_id!r}: to continue that job, give --job-id {newest.job_id}; to begin this job "
        f"with its state, give --resume-from {location} and another --checkpoint-dir, or none"
    )


def check_writable(manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> None:
    """Raise CheckpointError, before any write, if the manifest cannot be encoded."""
    nothing = checksum([])
    files = tuple(
        FileEntry(name=name, bytes=0, checksum=nothing, ranks=part.ranks)
        for name, part in parts.items()
    )
    encode(msgspec.structs.replace(manifest, files=files))


def bytes_of(manifest: Manifest) -> int:
    """Return the bytes of all files without the manifest."""
    return sum(entry.bytes for entry in manifest.files)
