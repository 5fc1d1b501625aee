"""Checkpoints in an object store that speaks S3.

    <prefix>/step-<step>-g<generation>/   one checkpoint: safetensors objects and manifest.json

Objects bear the checksum of their bytes in their names, and a manifest is created only where there
is none that counts: whoever writes beside us, or wrote before us and was killed, nothing that a
manifest names is ever changed. There is no lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import msgspec

from rekindle.checkpoints.block_checksums import summed
from rekindle.checkpoints.checkpoint_path import Key, entry_of
from rekindle.checkpoints.location import S3Location
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.checkpoints.multi_writer import check_part
from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention, may_go
from rekindle.checkpoints.s3 import cleaning as s3_pins
from rekindle.checkpoints.s3.cleaning import remove_checkpoint, remove_left_over
from rekindle.checkpoints.s3.client import Body, Bucket
from rekindle.checkpoints.s3.errors import S3Error, S3ErrorKind
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
from rekindle.checkpoints.s3.transfer import is_intact, upload
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


class S3Store:
    """All checkpoints of one job, below one prefix of a bucket."""

    def __init__(self, location: S3Location, bucket: Bucket) -> None:
        self._location = location
        self._bucket = bucket
        # What this process wrote or verified is not read again by prune() while it is unchanged.
        self._proven: dict[Key, Objects] = {}
        # Checkpoints that had nothing left over beside their files, as long as they are unchanged.
        self._tidy: Inventory = {}

    @property
    def location(self) -> str:
        """The location that `open_store()` takes."""
        return str(self._location)

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint; manifest.files is filled in from the parts (file names).

        A valid checkpoint of the same step and generation is left as it is; what is damaged of
        another is written again. Raises CheckpointError, and no such checkpoint exists, if it
        cannot be written; the next attempt goes on from there.
        """
        place = self._place((manifest.step, manifest.generation))
        check_writable(manifest, parts)
        if there := self._valid(place, place.objects()):
            return existing(place.url, there, manifest.job_id)
        files = tuple(self._put(place, name, part) for name, part in parts.items())
        return self._commit(place, msgspec.structs.replace(manifest, files=files))

    def write_part(self, step: int, generation: int, name: str, part: CheckpointFile) -> FileEntry:
        """Write one file of a checkpoint that counts once it is committed, with its other parts.

        A file that a committed checkpoint holds and that is intact is left as it is, and its entry
        returned. Raises CheckpointError if it cannot be written, or if the checkpoint has been
        committed without such a part; the next attempt goes on from there.
        """
        check_part(step, generation, name, part.ranks)
        place = self._place((step, generation))
        if there := place.committed(place.objects()):
            held = entry_of(place.url, there, name)
            if is_intact(place.source(held)):
                part.told(held.bytes)
                return held
        return self._put(place, name, part)

    def commit(self, manifest: Manifest) -> Written:
        """Make a checkpoint of the parts that manifest.files names, as write_part() returned them.

        Their sizes are checked; their bytes, which the server proved to their writers, are not read
        again. A checkpoint of the same step and generation that is complete is left as it is.
        Raises CheckpointError, with all parts left as they are, if one is missing or has another
        size, or if the manifest cannot be written.
        """
        place = self._place((manifest.step, manifest.generation))
        if not manifest.files:
            raise CheckpointError(f"cannot commit {place.url}: the manifest names no file")
        return self._commit(place, manifest)

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """The newest checkpoint (highest step, then generation) that is valid in every byte.

        at_most: the highest step that is wanted. Raises CheckpointError: the bucket cannot be read.
        """
        return newest_of(lambda: self._inventory(at_most), self._first_valid)

    def find(self, step: int, generation: int) -> S3Checkpoint | None:
        """The checkpoint of this step and generation, if it has all its files in their sizes.

        Their bytes are not looked at: who reads a file has it verified there.
        Raises CheckpointError: the bucket cannot be read.
        """
        place = self._place((step, generation))
        manifest = place.committed(place.objects())
        return S3Checkpoint(place, manifest) if manifest else None

    def keys(self, *, at_most: Key | None = None) -> list[Key]:
        """Step and generation of all finished checkpoints, newest first; nothing in them is read.

        at_most: the newest that is wanted. Raises CheckpointError: the bucket cannot be read.
        """
        finished = [key for key, objects in self._inventory().items() if is_finished(objects)]
        return sorted((key for key in finished if at_most is None or key <= at_most), reverse=True)

    def survey(self) -> list[CheckpointInfo]:
        """All that bears a checkpoint's name, newest first, whether it can be used or not.

        Raises CheckpointError: the bucket cannot be read.
        """
        return [seen_at(self._place(key), objects) for key, objects in self._inventory().items()]

    def at(self, manifest: Manifest) -> S3Checkpoint:
        """The checkpoint of this manifest, whatever lies in its place here; nothing is read."""
        return S3Checkpoint(self._place((manifest.step, manifest.generation)), manifest)

    def prune(self, retention: Retention) -> tuple[Key, ...]:
        """Remove what the retention does not keep, and say which, newest first.

        Never the newest valid checkpoint, nor one that is pinned. What killed writers left goes
        too, if a newer checkpoint is finished, and pins that have expired or keep nothing.
        Raises CheckpointError if one cannot be removed.
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
        """Keep a checkpoint from being pruned; False, and nothing is changed: it is not there.

        Once this has returned True, nobody prunes the checkpoint while the pin holds.
        Raises CheckpointError: the bucket cannot be written.
        """
        return s3_pins.add(self._bucket, pin)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin; one that is not there is no error. Raises CheckpointError."""
        s3_pins.remove(self._bucket, pin)

    def pins(self) -> list[Pin]:
        """All pins, also those that have expired. Raises CheckpointError: it cannot be read."""
        return s3_pins.listed(self._bucket)

    def _place(self, key: Key) -> S3Place:
        return S3Place(self._bucket, key)

    def _inventory(self, at_most: int | None = None) -> Inventory:
        """All that is in the bucket, newest first."""
        root = self._location.root
        inventory = inventory_of(root, self._bucket.objects(f"{root}step-"))
        wanted = (key for key in inventory if at_most is None or key[0] <= at_most)
        return {key: inventory[key] for key in sorted(wanted, reverse=True)}

    def _put(self, place: S3Place, name: str, part: CheckpointFile) -> FileEntry:
        # Summed before it is sent, for its name tells the checksum; and not asked for again then:
        # what makes chunks by reading them may read something else the second time.
        chunks = list(part.chunks)
        sums = summed(chunks)
        entry = sums.entry(name, part.ranks, stored_name(name, sums.checksum))
        source = place.source(entry)
        upload(source, Body(chunks), part.told)
        return entry

    def _commit(self, place: S3Place, manifest: Manifest) -> Written:
        objects = place.objects()
        there = place.committed(objects)
        # One with other files is what another attempt wrote: it counts if it can be read.
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
            # Also without the checkpoint: whoever made it fail may have seen its manifest, and
            # then has left its files. What cannot be removed now is left for the next time.
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
                place.objects()  # else it is not this checkpoint, but the server
                passed_over.append(SkippedCheckpoint(place.url, f"it cannot be read: {error}"))
        return NewestCheckpoint(None, tuple(passed_over))

    def _verified(self, place: S3Place, objects: Objects) -> Manifest:
        """The manifest, after all bytes were read; CorruptError, NewerFormatError or S3Error."""
        manifest = place.verified(objects)
        self._proven[place.step] = objects
        return manifest

    def _valid(self, place: S3Place, objects: Objects) -> Manifest | None:
        """The manifest of the valid checkpoint in this place; NewerFormatError."""
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
    """As `rekindle.checkpoints.open_store.Pointer` says.

    On a server that knows no conditional requests, of two who replace it at the same moment the
    second wins, and neither is refused.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self._key = bucket.location.root + name

    @property
    def location(self) -> str:
        """Its key, as a URL."""
        return self._bucket.location.url(self._key)

    def read(self) -> bytes | None:
        """The text; None: there is none."""
        try:
            return self._bucket.get(self._key)
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                return None
            raise

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""
        # The tag is that of `old` or of an older text: then the server refuses.
        tags = [each.etag for each in self._bucket.objects(self._key) if each.key == self._key]
        if self.read() != old:
            return False
        try:
            return self._put(data, tags[0] if tags else None)
        except S3Error as error:
            # Also where ours was refused: the answer to the first try may have been lost.
            if error.kind in (S3ErrorKind.EXISTS, S3ErrorKind.MISSING):
                return self.read() == data
            raise

    def _put(self, data: bytes, tag: str | None) -> bool:
        body = Body([data]).slice(0, len(data))
        try:
            self._bucket.put(self._key, body, new=tag is None, over=tag or "")
        except S3Error as error:
            if error.kind is not S3ErrorKind.UNSUPPORTED:
                raise
            self._bucket.put(self._key, body)
        return True
