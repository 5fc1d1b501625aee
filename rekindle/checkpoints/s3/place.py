"""The place of a checkpoint in S3, and the objects of a store by their checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from rekindle.checkpoints.block_checksums import check_range
from rekindle.checkpoints.checkpoint_path import (
    UNFINISHED,
    entry_of,
    is_outdated,
    key_of,
    manifest_of,
    name_of,
)
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest, encode
from rekindle.checkpoints.s3.client import Bucket, Slice, Stored
from rekindle.checkpoints.s3.parallel_transfer import Source, read_into, read_range, verify
from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind
from rekindle.checkpoints.store import CheckpointInfo
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError
from rekindle.states import StateId

# The objects of one checkpoint, by the rest of their key; and the objects of all checkpoints.
Objects: TypeAlias = dict[str, Stored]
Inventory: TypeAlias = dict[StateId, Objects]

# Name of the mark: a process is removing this unfinished checkpoint.
ABANDONED: Final = ".abandoned"
# Seconds, by the server's clock. The process that wrote an older mark was killed.
ABANDONED_S: Final = 600.0


def stored_name(name: str, checksum: str) -> str:
    """Return the object's name of a file. It contains a part of the checksum of the bytes.

    Files with other bytes have other names. A writer therefore cannot damage another writer's
    object.
    """
    stem, dot, suffix = name.rpartition(".")
    digest = checksum.partition(":")[2][:16]
    return f"{stem}-{digest}.{suffix}" if dot else f"{name}-{digest}"


def step_of(root: str, key: str) -> tuple[StateId, str] | None:
    """Return the object's checkpoint and its name there, or None for another object."""
    place, _, name = key.removeprefix(root).partition("/")
    step = key_of(place)
    return (step, name) if step and name else None


def inventory_of(root: str, stored: Iterable[Stored]) -> Inventory:
    """Return these objects by checkpoint."""
    inventory: Inventory = {}
    for found in stored:
        if step := step_of(root, found.key):
            inventory.setdefault(step[0], {})[step[1]] = found
    return inventory


def is_finished(objects: Objects) -> bool:
    """Return whether the objects include a manifest that is not empty."""
    return MANIFEST_FILE in objects and objects[MANIFEST_FILE].bytes > 0


def check_sizes(manifest: Manifest, objects: Objects) -> None:
    """Raise CorruptError unless each file exists with its size in the manifest."""
    for entry in manifest.files:
        if entry.file not in objects:
            raise CorruptError(f"{entry.name} is missing")
        actual = objects[entry.file].bytes
        if actual != entry.bytes:
            raise CorruptError(f"{entry.name} has {actual} bytes, the manifest has {entry.bytes}")


def outdated(inventory: Inventory, places: Iterable[StateId]) -> list[StateId]:
    """Return the places that no process writes to, because a newer checkpoint is finished."""
    finished = [key for key, objects in inventory.items() if is_finished(objects)]
    return [key for key in places if is_outdated(key, finished)]


def unreferenced(objects: Objects, manifest: Manifest) -> list[Stored]:
    """Return the objects that the manifest does not name.

    Another writer or an earlier attempt left them.
    """
    named = {MANIFEST_FILE, *(entry.file for entry in manifest.files)}
    return [found for name, found in objects.items() if name not in named]


class S3Place:
    """The place of one checkpoint, which may not exist yet."""

    def __init__(self, bucket: Bucket, key: StateId) -> None:
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
        """Mark the checkpoint as abandoned, and return its objects. Return {} if it is committed.

        A process that commits first writes the manifest, and then looks for the mark
        (check_complete). This method first writes the mark, and then looks for the manifest.
        Therefore at least one of the two processes sees the other.
        """
        self.bucket.put(self._prefix + ABANDONED, Slice([]))
        objects = self.objects()
        if not is_finished(objects):
            return objects
        self.bucket.delete(self._prefix + ABANDONED)
        return {}

    def source(self, entry: FileEntry) -> Source:
        return Source(self.bucket, self._prefix + entry.file, entry)

    def objects(self) -> Objects:
        """Return the objects that exist now."""
        stored = self.bucket.objects(self._prefix)
        return inventory_of(self.bucket.location.root, stored).get(self.step, {})

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises CorruptError: there is no manifest of this step and generation. NewerFormatError: a
        later version of Rekindle wrote it.
        """
        try:
            try:
                return manifest_of(self.step, self.bucket.get(self.manifest_key))
            except CorruptError:
                # Without TLS, the answer may have been damaged on the way.
                return manifest_of(self.step, self.bucket.get(self.manifest_key))
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                raise CorruptError(UNFINISHED) from error
            raise

    def committed(self, objects: Objects) -> Manifest | None:
        """Return the manifest, or None unless it and all its files exist with their sizes.

        Raises NewerFormatError: a later version wrote the manifest.
        """
        try:
            manifest = self.manifest() if is_finished(objects) else None
            if manifest:
                check_sizes(manifest, objects)
        except CorruptError:
            return None
        return manifest

    def is_newer(self) -> bool:
        """Return whether a later version of Rekindle wrote the manifest here."""
        try:
            self.manifest()
        except NewerFormatError:
            return True
        except CorruptError:
            pass
        return False

    def verified(self, objects: Objects) -> Manifest:
        """Verify all bytes of the files, and return the manifest. Raises CorruptError."""
        manifest = self.manifest()
        check_sizes(manifest, objects)
        verify(map(self.source, manifest.files))
        return manifest

    def create_manifest(self, manifest: Manifest, *, over: bool) -> Manifest:
        """Create the manifest unless one exists. Return the manifest that exists afterwards.

        over: the existing manifest is not valid, so this one replaces it. Otherwise the server
        creates the object only if it does not exist, if the server supports conditions. On other
        servers, another writer can replace this manifest with its own manifest of the same step at
        this moment.
        """
        try:
            self.bucket.put(self.manifest_key, Slice([encode(manifest)]), new=not over)
        except S3Error as error:
            if error.kind is S3ErrorKind.UNSUPPORTED and not over:
                return self.create_manifest(manifest, over=True)
            if error.kind is not S3ErrorKind.EXISTS:
                raise
        # Also after EXISTS: the first request may have succeeded, and its answer may have been
        # lost.
        return self.manifest()

    def check_complete(self, manifest: Manifest) -> Objects:
        """Return the objects after the manifest was created, if they are complete.

        If a process that saw a newer checkpoint has removed files as left over, or is removing
        them, the method removes the manifest. Raises CheckpointError then.
        """
        objects = self.objects()
        try:
            mark, own = objects.get(ABANDONED), objects.get(MANIFEST_FILE)
            if mark and own and own.modified - mark.modified < ABANDONED_S:
                raise CorruptError("another process removes it")
            check_sizes(manifest, objects)
        except CorruptError as error:
            self.bucket.delete(self.manifest_key)
            raise CheckpointError(
                f"another process removed {self.url} during the commit ({error}), because it "
                "committed a newer checkpoint"
            ) from error
        return objects


class S3Checkpoint:
    """A checkpoint in S3. Implements `rekindle.checkpoints.store.Checkpoint`."""

    def __init__(self, place: S3Place, manifest: Manifest) -> None:
        self.manifest = manifest
        self._place = place

    @property
    def location(self) -> str:
        """Return the beginning of its objects' keys, as a URL."""
        return self._place.url

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view with this file's bytes, starting at `begin`. Their blocks are verified.

        Raises CorruptError if they are not what was written. CheckpointError if unreadable, or if
        the file does not have these bytes.
        """
        entry = entry_of(self.location, self.manifest, name)
        check_range(entry, begin, len(view))
        read_into(self._place.source(entry), begin, view)

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """Return the unverified bytes of this file from `begin` to `end`; fewer if it ends before.

        Raises MissingError, CheckpointError if unreadable.
        """
        entry = entry_of(self.location, self.manifest, name)
        return read_range(self._place.source(entry), begin, end)


def seen_at(place: S3Place, objects: Objects) -> CheckpointInfo:
    """Describe the checkpoint of these objects. Raises S3Error: its manifest cannot be read."""
    manifest, reason, newer = None, "", False
    try:
        manifest = place.manifest()
        check_sizes(manifest, objects)
    except (CorruptError, NewerFormatError) as error:
        reason, newer = str(error), isinstance(error, NewerFormatError)
    return CheckpointInfo(place.url, *place.step, manifest, reason, not is_finished(objects), newer)
