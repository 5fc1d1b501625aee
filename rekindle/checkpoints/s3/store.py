"""Checkpoints in an object store with the S3 protocol.

    <prefix>/step-<step>-g<generation>/   one checkpoint: safetensors objects and manifest.json

The name of an object contains the checksum of its bytes, and a writer creates a manifest only if
there is no valid one. Therefore no writer changes an object that a manifest names, also if other
writers work at the same time or were killed. The store does not use a lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import msgspec

from rekindle.checkpoints.block_checksums import summed
from rekindle.checkpoints.checkpoint_path import entry_of
from rekindle.checkpoints.location import S3Location
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.checkpoints.multi_writer import check_part
from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention, may_go
from rekindle.checkpoints.s3 import cleaning as s3_pins
from rekindle.checkpoints.s3.cleaning import remove_checkpoint, remove_left_over
from rekindle.checkpoints.s3.client import Body, Bucket, Slice
from rekindle.checkpoints.s3.parallel_transfer import is_intact, upload
from rekindle.checkpoints.s3.place import (
    Inventory,
    Objects,
    S3Checkpoint,
    S3Place,
    check_sizes,
    inventory_of,
    is_finished,
    seen_at,
    stored_name,
)
from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind
from rekindle.checkpoints.store import (
    CheckpointFile,
    CheckpointInfo,
    NewestCheckpoint,
    SkippedCheckpoint,
    Written,
    bytes_of,
    check_writable,
    existing,
    newest_of,
)
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError
from rekindle.states import StateId


class S3Store:
    """All checkpoints of one job, below one prefix of a bucket."""

    def __init__(self, location: S3Location, bucket: Bucket) -> None:
        self._location = location
        self._bucket = bucket
        # prune() does not read checkpoints again that this process wrote or verified, if they are
        # unchanged.
        self._proven: dict[StateId, Objects] = {}
        # Checkpoints without left-over objects next to their files, as they were at the last check.
        self._tidy: Inventory = {}

    @property
    def location(self) -> str:
        """Return the location that `open_store()` accepts."""
        return str(self._location)

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint. manifest.files is filled in from the parts (file names).

        The method does not change a valid checkpoint of the same step and generation. If that
        checkpoint is invalid, the method writes only its damaged files again.
        Raises CheckpointError if it cannot be written. The checkpoint does not exist then, and the
        next attempt reuses the parts that were sent.
        """
        place = self._place(manifest.state)
        check_writable(manifest, parts)
        if there := self._valid(place, place.objects()):
            return existing(place.url, there, manifest.job_id)
        files = tuple(self._put(place, name, part) for name, part in parts.items())
        return self._commit(place, msgspec.structs.replace(manifest, files=files))

    def write_part(self, step: int, generation: int, name: str, part: CheckpointFile) -> FileEntry:
        """Write one file of a checkpoint. The checkpoint is valid after commit().

        If a committed checkpoint holds the file and it is intact, the method changes nothing and
        returns its entry.
        Raises CheckpointError if it cannot be written, or if the checkpoint has been committed
        without such a part. The next attempt reuses the parts that were sent.
        """
        check_part(step, generation, name, part.ranks)
        place = self._place(StateId(step, generation))
        if there := place.committed(place.objects()):
            held = entry_of(place.url, there, name)
            if is_intact(place.source(held)):
                part.on_bytes(held.bytes)
                return held
        return self._put(place, name, part)

    def commit(self, manifest: Manifest) -> Written:
        """Commit the parts that manifest.files names, as write_part() returned them.

        The method checks the sizes of the parts. It does not read their bytes, because the server
        has verified them for their writers. It does not change a checkpoint of the same step and
        generation that has the same files or is valid.
        Raises CheckpointError if a part is missing or has another size, or if the manifest cannot
        be written. All parts are unchanged then.
        """
        place = self._place(manifest.state)
        if not manifest.files:
            raise CheckpointError(f"cannot commit {place.url}: the manifest does not list a file")
        return self._commit(place, manifest)

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """Return the newest checkpoint (highest step, then generation) with all bytes verified.

        at_most: the highest step that is allowed. Raises CheckpointError: the bucket cannot be
        read.
        """
        return newest_of(lambda: self._inventory(at_most), self._first_valid)

    def find(self, step: int, generation: int) -> S3Checkpoint | None:
        """Return the checkpoint of this step and generation, or None.

        The method returns None unless all files exist with their sizes. read() verifies the bytes.
        Raises CheckpointError: the bucket cannot be read.
        """
        place = self._place(StateId(step, generation))
        manifest = place.committed(place.objects())
        return S3Checkpoint(place, manifest) if manifest else None

    def keys(self, *, at_most: StateId | None = None) -> list[StateId]:
        """Return step and generation of all finished checkpoints, newest first. No object is read.

        at_most: the newest key that is allowed. Raises CheckpointError: the bucket cannot be read.
        """
        finished = [key for key, objects in self._inventory().items() if is_finished(objects)]
        return sorted((key for key in finished if at_most is None or key <= at_most), reverse=True)

    def survey(self) -> list[CheckpointInfo]:
        """Describe everything with a checkpoint's name, usable or not, newest first.

        Raises CheckpointError: the bucket cannot be read.
        """
        return [seen_at(self._place(key), objects) for key, objects in self._inventory().items()]

    def at(self, manifest: Manifest) -> S3Checkpoint:
        """Return the checkpoint of this manifest in this store. The method reads no object."""
        return S3Checkpoint(self._place(manifest.state), manifest)

    def prune(self, retention: Retention) -> tuple[StateId, ...]:
        """Remove the checkpoints that the retention does not keep. Return them, newest first.

        The method never removes the newest valid checkpoint or a pinned one. If a newer checkpoint
        is finished, the method also removes the objects of writers that were killed. It also
        removes pins that have expired or whose checkpoint is gone.
        Raises CheckpointError if a checkpoint cannot be removed.
        """
        inventory = self._inventory()
        remove_left_over(self._bucket, inventory, self._tidy)
        removed = []
        old = may_go(
            [key for key, objects in inventory.items() if is_finished(objects)],
            retention,
            is_valid=lambda key: self._is_valid(self._place(key), inventory[key]),
            manifest_of=lambda key: self._place(key).manifest(),
            pins=s3_pins.listed(self._bucket),
            now=time.time(),
        )
        for key in old:
            if self._place(key).is_newer():
                continue
            if s3_pins.revoke(self._bucket, key, time.time()):
                remove_checkpoint(self._bucket, inventory.pop(key))
                self._proven.pop(key, None)
                removed.append(key)
        s3_pins.sweep(self._bucket, self.keys, time.time())
        return tuple(removed)

    def pin(self, pin: Pin) -> bool:
        """Protect a checkpoint from pruning. Return False, without a change, if it does not exist.

        After this has returned True, no process prunes the checkpoint while the pin holds.
        Raises CheckpointError: the bucket cannot be written.
        """
        return s3_pins.add(self._bucket, pin)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin. A missing pin is not an error. Raises CheckpointError."""
        s3_pins.remove(self._bucket, pin)

    def pins(self) -> list[Pin]:
        """Return all pins, also expired ones. Raises CheckpointError: they cannot be read."""
        return s3_pins.listed(self._bucket)

    def _place(self, key: StateId) -> S3Place:
        return S3Place(self._bucket, key)

    def _inventory(self, at_most: int | None = None) -> Inventory:
        """Return the objects of all checkpoints in the bucket, newest first."""
        root = self._location.root
        inventory = inventory_of(root, self._bucket.objects(f"{root}step-"))
        wanted = (key for key in inventory if at_most is None or key[0] <= at_most)
        return {key: inventory[key] for key in sorted(wanted, reverse=True)}

    def _put(self, place: S3Place, name: str, part: CheckpointFile) -> FileEntry:
        # The object's name contains the checksum, so it is computed before the upload. The chunks
        # are read only once, because a second read may return other bytes.
        chunks = list(part.chunks)
        sums = summed(chunks)
        entry = sums.entry(name, part.ranks, stored_name(name, sums.checksum))
        source = place.source(entry)
        upload(source, Body(chunks), part.on_bytes)
        return entry

    def _commit(self, place: S3Place, manifest: Manifest) -> Written:
        objects = place.objects()
        there = place.committed(objects)
        # Another attempt may have committed other files. They remain valid if they can be read.
        if there and (there.files == manifest.files or self._is_valid(place, objects)):
            return existing(place.url, there, manifest.job_id)
        try:
            check_sizes(manifest, objects)
        except CorruptError as error:
            raise CheckpointError(f"cannot commit {place.url}: {error}") from error
        created = place.create_manifest(manifest, over=MANIFEST_FILE in objects)
        if created != manifest:
            return existing(place.url, created, manifest.job_id)
        try:
            self._proven[place.step] = place.check_complete(manifest)
        finally:
            # Also after a failure: the process that caused it may have seen this manifest, and then
            # has not removed its files. The next commit or prune removes objects that cannot be
            # removed now.
            with contextlib.suppress(CheckpointError):
                remove_left_over(self._bucket.at_once(), self._inventory(), self._tidy)
        return Written(place.url, bytes_of(manifest), existed=False)

    def _first_valid(self, inventory: Inventory) -> NewestCheckpoint:
        passed_over: list[SkippedCheckpoint] = []
        for key, objects in inventory.items():
            place = self._place(key)
            try:
                checkpoint = S3Checkpoint(place, self._verified(place, objects))
                return NewestCheckpoint(checkpoint, tuple(passed_over))
            except (CorruptError, NewerFormatError) as error:
                passed_over.append(SkippedCheckpoint(place.url, str(error)))
            except S3Error as error:
                if error.kind not in (S3ErrorKind.PASSING, S3ErrorKind.ARCHIVED):
                    raise
                place.objects()  # if this fails also, the server is the cause
                passed_over.append(SkippedCheckpoint(place.url, f"it cannot be read: {error}"))
        return NewestCheckpoint(None, tuple(passed_over))

    def _verified(self, place: S3Place, objects: Objects) -> Manifest:
        """Read and verify all bytes, and return the manifest.

        Raises CorruptError, NewerFormatError or S3Error.
        """
        manifest = place.verified(objects)
        self._proven[place.step] = objects
        return manifest

    def _valid(self, place: S3Place, objects: Objects) -> Manifest | None:
        """Return the manifest of the valid checkpoint in this place, or None.

        Raises NewerFormatError: a later version wrote the manifest.
        """
        try:
            return self._verified(place, objects) if is_finished(objects) else None
        except CorruptError:
            return None

    def _is_valid(self, place: S3Place, objects: Objects) -> bool:
        unchanged = self._proven.get(place.step) == objects
        try:
            return unchanged or self._valid(place, objects) is not None
        except NewerFormatError:
            return False


class S3Pointer:
    """A pointer in S3. Implements `rekindle.checkpoints.open_store.Pointer`.

    On a server without conditional requests, two processes can replace the text at the same moment.
    The second text remains then, and both processes succeed.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self._key = bucket.location.root + name

    @property
    def location(self) -> str:
        """Return its key, as a URL."""
        return self._bucket.location.url(self._key)

    def read(self) -> bytes | None:
        """Return the text; None: it does not exist."""
        try:
            return self._bucket.get(self._key)
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                return None
            raise

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text if the present text is `old`. Otherwise return False without a change."""
        # The tag belongs to `old` or to an earlier text. If it belongs to an earlier text, the
        # server refuses the request.
        tags = [each.etag for each in self._bucket.objects(self._key) if each.key == self._key]
        if self.read() != old:
            return False
        try:
            return self._put(data, tags[0] if tags else None)
        except S3Error as error:
            # Also after EXISTS: the first request may have succeeded, and its answer may have been
            # lost.
            if error.kind in (S3ErrorKind.EXISTS, S3ErrorKind.MISSING):
                return self.read() == data
            raise

    def remove(self, old: bytes) -> bool:
        """Remove the text if it is `old`. Otherwise return False without a change.

        S3 has no condition for this: a text that another process writes at this moment is lost.
        """
        if self.read() != old:
            return False
        self._bucket.delete(self._key)
        return True

    def _put(self, data: bytes, tag: str | None) -> bool:
        try:
            self._bucket.put(self._key, Slice([data]), new=tag is None, over=tag or "")
        except S3Error as error:
            if error.kind is not S3ErrorKind.UNSUPPORTED:
                raise
            self._bucket.put(self._key, Slice([data]))
        return True
