"""The place of a checkpoint in S3, and the objects of a store by their checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from rekindle.checkpoints.block_checksums import check_range
from rekindle.checkpoints.checkpoint_path import (
    UNFINISHED,
    Key,
    entry_of,
    is_outdated,
    key_of,
    manifest_of,
    name_of,
)
from rekindle.checkpoints.files import private_memory
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest, encode
from rekindle.checkpoints.s3.client import Body, Bucket, Stored
from rekindle.checkpoints.s3.errors import S3Error, S3ErrorKind
from rekindle.checkpoints.s3.transfer import Source, read_into, read_range, verify
from rekindle.checkpoints.store import CheckpointInfo
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError

# The objects of one checkpoint by the rest of their key, and of all checkpoints.
Objects: TypeAlias = dict[str, Stored]
Inventory: TypeAlias = dict[Key, Objects]


def stored_name(name: str, checksum: str) -> str:
    """What a file with these bytes is called: never the same as one with others.

    So no writer can damage what another one has written, or is writing.
    """
    stem, dot, suffix = name.rpartition(".")
    digest = checksum.partition(":")[2][:16]
    return f"{stem}-{digest}.{suffix}" if dot else f"{name}-{digest}"


def step_of(root: str, key: str) -> tuple[Key, str] | None:
    """The checkpoint that this object belongs to, and its name there; None if to none."""
    place, _, name = key.removeprefix(root).partition("/")
    step = key_of(place)
    return (step, name) if step and name else None


def inventory_of(root: str, stored: Iterable[Stored]) -> Inventory:
    """These objects by checkpoint."""
    inventory: Inventory = {}
    for found in stored:
        if step := step_of(root, found.key):
            inventory.setdefault(step[0], {})[step[1]] = found
    return inventory


def is_finished(objects: Objects) -> bool:
    """Whether there is a manifest."""
    return MANIFEST_FILE in objects and objects[MANIFEST_FILE].bytes > 0


def check_sizes(manifest: Manifest, objects: Objects) -> None:
    """Raise CorruptError unless each file is there with the size that the manifest says."""
    for entry in manifest.files:
        if entry.file not in objects:
            raise CorruptError(f"{entry.name} is missing")
        actual = objects[entry.file].bytes
        if actual != entry.bytes:
            raise CorruptError(f"{entry.name} has {actual} bytes, the manifest says {entry.bytes}")


def outdated(inventory: Inventory, places: Iterable[Key]) -> list[Key]:
    """Those of these places that nobody writes any more: something newer is finished."""
    finished = [key for key, objects in inventory.items() if is_finished(objects)]
    return [key for key in places if is_outdated(key, finished)]


def unreferenced(objects: Objects, manifest: Manifest) -> list[Stored]:
    """What another writer, or an earlier attempt, left beside the files of a checkpoint."""
    named = {MANIFEST_FILE, *(entry.file for entry in manifest.files)}
    return [found for name, found in objects.items() if name not in named]


# The object that says that an unfinished checkpoint is being removed.
ABANDONED: Final = ".abandoned"
# Whoever has put it that long ago, by the server's clock, was killed.
ABANDONED_S: Final = 600.0


class S3Place:
    """Where one checkpoint is, or is to be."""

    def __init__(self, bucket: Bucket, key: Key) -> None:
        self.bucket = bucket
        self.step = key
        self._prefix = f"{bucket.location.root}{name_of(*key)}/"

    @property
    def url(self) -> str:
        return self.bucket.location.url(self._prefix)

    @property
    def manifest_key(self) -> str:
        return self._prefix + MANIFEST_FILE

    def abandon(self) -> Objects:
        """Say that nobody goes on with it, and what is there then; none: it has been committed.

        Whoever commits puts the manifest first and looks then (check_complete); here it is the
        other way round. So one of both sees the other.
        """
        self.bucket.put(self._prefix + ABANDONED, Body([]).slice(0, 0))
        objects = self.objects()
        if not is_finished(objects):
            return objects
        self.bucket.delete(self._prefix + ABANDONED)
        return {}

    def source(self, entry: FileEntry) -> Source:
        return Source(self.bucket, self._prefix + entry.file, entry)

    def objects(self) -> Objects:
        """What is there now."""
        stored = self.bucket.objects(self._prefix)
        return inventory_of(self.bucket.location.root, stored).get(self.step, {})

    def manifest(self) -> Manifest:
        """Raises CorruptError if there is none of this step and generation."""
        try:
            try:
                return manifest_of(self.step, self.bucket.get(self.manifest_key))
            except CorruptError:
                # Without TLS it may have been damaged on the way.
                return manifest_of(self.step, self.bucket.get(self.manifest_key))
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                raise CorruptError(UNFINISHED) from error
            raise

    def committed(self, objects: Objects) -> Manifest | None:
        """The manifest, if there is one and all its files are there with their sizes.

        Raises NewerFormatError if it is not ours to tell.
        """
        try:
            manifest = self.manifest() if is_finished(objects) else None
            if manifest:
                check_sizes(manifest, objects)
        except CorruptError:
            return None
        return manifest

    def is_newer(self) -> bool:
        """Whether a later version of Rekindle wrote the manifest here."""
        try:
            self.manifest()
        except NewerFormatError:
            return True
        except CorruptError:
            pass
        return False

    def verified(self, objects: Objects) -> Manifest:
        """The manifest, after all bytes of its files were read; else CorruptError."""
        manifest = self.manifest()
        check_sizes(manifest, objects)
        verify(map(self.source, manifest.files))
        return manifest

    def create_manifest(self, manifest: Manifest, *, over: bool) -> Manifest:
        """The manifest that is there once this one was to be.

        over: what is there is none that counts, and is written over. Else it is created only if
        there is none, by the server if it knows how to; all that another writer can do on one that
        does not is to put its own, of the same step, in place of ours at this moment.
        """
        data = encode(manifest)
        body = Body([data]).slice(0, len(data))
        try:
            self.bucket.put(self.manifest_key, body, new=not over)
        except S3Error as error:
            if error.kind is S3ErrorKind.UNSUPPORTED and not over:
                return self.create_manifest(manifest, over=True)
            if error.kind is not S3ErrorKind.EXISTS:
                raise
        # Also where ours was refused: the answer to the first try may have been lost.
        return self.manifest()

    def check_complete(self, manifest: Manifest) -> Objects:
        """What is there, after this manifest was created; without a file of it, it goes again.

        Whoever had found a newer checkpoint may have removed files as left over.
        """
        objects = self.objects()
        try:
            mark, own = objects.get(ABANDONED), objects.get(MANIFEST_FILE)
            if mark and own and own.modified - mark.modified < ABANDONED_S:
                raise CorruptError("another process is removing it")
            check_sizes(manifest, objects)
        except CorruptError as error:
            self.bucket.delete(self.manifest_key)
            raise CheckpointError(
                f"{self.url} was removed while it was committed ({error}): "
                "a newer checkpoint was committed"
            ) from error
        return objects


class S3Checkpoint:
    """A checkpoint in S3, as `rekindle.checkpoints.store.Checkpoint` says."""

    def __init__(self, place: S3Place, manifest: Manifest) -> None:
        self.manifest = manifest
        self._place = place

    @property
    def location(self) -> str:
        """What the keys of its objects begin with, as a URL."""
        return self._place.url

    def read(self, name: str) -> memoryview:
        """The bytes of this file, in private memory; they were verified there.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        entry = entry_of(self.location, self.manifest, name)
        memory = private_memory(entry.bytes)
        read_into(self._place.source(entry), 0, memory)
        return memory

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view with this file's bytes from `begin` on, verified by the blocks they lie in.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        entry = entry_of(self.location, self.manifest, name)
        check_range(entry, begin, len(view))
        read_into(self._place.source(entry), begin, view)

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """The bytes of this file from `begin` to `end` as they lie there; fewer if it ends before.

        Raises MissingError, CheckpointError if unreadable.
        """
        entry = entry_of(self.location, self.manifest, name)
        return read_range(self._place.source(entry), begin, end)


def seen_at(place: S3Place, objects: Objects) -> CheckpointInfo:
    """What these objects tell of their checkpoint; S3Error: its manifest cannot be read."""
    manifest, reason, newer = None, "", False
    try:
        manifest = place.manifest()
        check_sizes(manifest, objects)
    except (CorruptError, NewerFormatError) as error:
        reason, newer = str(error), isinstance(error, NewerFormatError)
    return CheckpointInfo(place.url, *place.step, manifest, reason, not is_finished(objects), newer)
