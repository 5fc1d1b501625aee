"""Checkpoints in a local or shared directory.

    <root>/step-<step>-g<generation>/   one checkpoint: plain safetensors files and manifest.json
    <root>/.lock                        held while a process writes, commits or prunes
    <root>/pins/                        what keeps checkpoints from being pruned

A checkpoint is written in its own place, the manifest last. Nothing is renamed, so that this holds
on file systems where renaming is a copy; a torn manifest is recognised by its own checksum.

One process writes a checkpoint alone, with write(); or several, on any machines that share the
directory, write one file each with write_part(), without the lock while they do, and when all are
written one process makes them a checkpoint with commit().
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rekindle.checkpoints import manifest as manifests
from rekindle.checkpoints import multi_writer as shared
from rekindle.checkpoints import pins
from rekindle.checkpoints.block_checksums import check_range
from rekindle.checkpoints.checkpoint_path import (
    Key,
    Traces,
    committed,
    entry_of,
    is_newer,
    is_outdated,
    is_unfinished,
    key_of,
    look_at,
    name_of,
    read_manifest,
    traces,
)
from rekindle.checkpoints.files import (
    explained,
    load_file,
    load_into,
    locked,
    make_directories,
    new_directory,
    read_range,
    verify_file,
    write_file,
)
from rekindle.checkpoints.format import Bytes
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention, may_go
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


class DirectoryCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in a directory, as `rekindle.checkpoints.store.Checkpoint` says."""

    path: Path
    manifest: Manifest

    @property
    def location(self) -> str:
        """Its directory."""
        return str(self.path)

    def read(self, name: str) -> memoryview:
        """The bytes of this file, in private memory; they were verified there.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        entry = entry_of(self.path, self.manifest, name)
        with explained("read", self.path / entry.file):
            return load_file(self.path / entry.file, entry)

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view with this file's bytes from `begin` on, verified by the blocks they lie in.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        entry = entry_of(self.path, self.manifest, name)
        check_range(entry, begin, len(view))
        with explained("read", self.path / entry.file):
            load_into(self.path / entry.file, entry, begin, view)

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """The bytes of this file from `begin` to `end` as they lie there; fewer if it ends before.

        Raises MissingError, CorruptError if it is no plain file, CheckpointError if unreadable.
        """
        entry = entry_of(self.path, self.manifest, name)
        with explained("read", self.path / entry.file):
            return read_range(self.path / entry.file, begin, end)


class DirectoryStore:
    """All checkpoints of one job, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # What this process wrote or verified is not read again by prune() while it is unchanged.
        self._proven: dict[Path, Traces] = {}

    @property
    def location(self) -> str:
        """The directory."""
        return str(self.root)

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint; manifest.files is filled in from the parts (file names).

        Waits while another process writes or prunes here. A valid checkpoint of the same step and
        generation is left as it is; anything else in its place is written over.
        Raises CheckpointError, with nothing of this checkpoint left, if it cannot be written.
        """
        path = self._place((manifest.step, manifest.generation))
        check_writable(manifest, parts)
        with explained("write the checkpoint", path):
            make_directories(self.root)
            with locked(self.root):
                there = self._valid(path)
                if there is None:
                    self._remove_unfinished()
                    there = self._write(path, manifest, parts)
                    self._remove_unfinished()
                    return Written(str(path), bytes_of(there), existed=False)
        return existing(str(path), there, manifest.job_id)

    def write_part(self, step: int, generation: int, name: str, part: CheckpointFile) -> FileEntry:
        """Write one file of a checkpoint that counts once it is committed, with its other parts.

        A file of that name, whole or torn, is written over, unless a committed checkpoint holds it
        and it is intact: then it is left as it is, and its entry returned.
        Raises CheckpointError, with nothing of this part left and the others' untouched, if it
        cannot be written, or if the checkpoint has been committed without such a part.
        """
        path = self._place((step, generation))
        shared.check_part(step, generation, name, part.ranks)
        with explained("write", path / name):
            return shared.write_part(path, name, _told(part), part.ranks)

    def commit(self, manifest: Manifest) -> Written:
        """Make a checkpoint of the parts that manifest.files names, as write_part() returned them.

        Their sizes are checked; their bytes, which their writers wrote through, are read again
        only of one that was written over. A checkpoint of the same step and generation is left as
        it is, if it has the same files or is valid.
        Raises CheckpointError, with all parts left as they are, if one is missing or has another
        size, or if the manifest cannot be written.
        """
        path = self._place((manifest.step, manifest.generation))
        if not manifest.files:
            raise CheckpointError(f"cannot commit {path}: the manifest names no file")
        with explained("commit", path):
            make_directories(self.root)
            with locked(self.root):
                there = committed(path)
                # One with other files is what another writer made of its own: it counts if it can
                # be read.
                if there and there.files != manifest.files and not self._is_valid(path):
                    there = None
                if there is None:
                    shared.write_manifest(path, manifest)
                    self._proven[path] = traces(path)
                    self._remove_unfinished()
                    return Written(str(path), bytes_of(manifest), existed=False)
        return existing(str(path), there, manifest.job_id)

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """The newest checkpoint (highest step, then generation) that is valid in every byte.

        at_most: the highest step that is wanted.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            return newest_of(lambda: self._listed(at_most), self._first_valid)

    def find(self, step: int, generation: int) -> DirectoryCheckpoint | None:
        """The checkpoint of this step and generation, if it has all its files.

        Their sizes are looked at, their bytes are not: who reads a file has it verified there.
        Raises CheckpointError if its directory exists but cannot be read.
        """
        path = self._place((step, generation))
        with explained("read", path):
            manifest = committed(path)
        return DirectoryCheckpoint(path, manifest) if manifest else None

    def keys(self, *, at_most: Key | None = None) -> list[Key]:
        """Step and generation of all finished checkpoints, newest first; nothing in them is read.

        at_most: the newest that is wanted.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            return self._finished(at_most)

    def survey(self) -> list[CheckpointInfo]:
        """All that bears a checkpoint's name, newest first, whether it can be used or not.

        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            keys = self._keys()
        return [_seen(self._place(key), key) for key in keys]

    def at(self, manifest: Manifest) -> DirectoryCheckpoint:
        """The checkpoint of this manifest, whatever lies in its place here; nothing is read."""
        return DirectoryCheckpoint(self._place((manifest.step, manifest.generation)), manifest)

    def prune(self, retention: Retention) -> tuple[Key, ...]:
        """Remove what the retention does not keep, and say which, newest first.

        Never the newest valid checkpoint, nor one that is pinned. What killed writers left goes
        too, if a newer checkpoint is finished, and pins that have expired or keep nothing.
        Raises CheckpointError if one cannot be removed.
        """
        with explained("prune", self.root):
            if not self._keys():
                return ()
            with locked(self.root):
                self._remove_unfinished()
                old = may_go(
                    self._finished(),
                    retention,
                    is_valid=lambda key: self._is_valid(self._place(key)),
                    manifest_of=lambda key: read_manifest(self._place(key)),
                    pins=pins.listed(self.root),
                    now=time.time(),
                )
                removed = tuple(key for key in old if self._remove(key))
                pins.sweep(self.root, self._finished(), time.time())
                return removed

    def pin(self, pin: Pin) -> bool:
        """Keep a checkpoint from being pruned; False, and nothing is changed: it is not there.

        Once this has returned True, nobody prunes the checkpoint while the pin holds, unless the
        file system has no locks. Raises CheckpointError: the directory cannot be written.
        """
        with explained("pin a checkpoint in", self.root):
            return pins.add(self.root, self._place(pin.key), pin)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin; one that is not there is no error. Raises CheckpointError."""
        with explained("remove a pin from", self.root):
            pins.remove(self.root, pin)

    def pins(self) -> list[Pin]:
        """All pins, also those that have expired. Raises CheckpointError: it cannot be read."""
        with explained("read the pins of", self.root):
            return pins.listed(self.root)

    def _place(self, key: Key) -> Path:
        return self.root / name_of(*key)

    def _keys(self, at_most: int | None = None) -> list[Key]:
        """Those of the directories that bear a checkpoint's name, newest first."""
        keys = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                key = key_of(entry.name)
                if key and entry.is_dir(follow_symlinks=False):
                    keys.append(key)
        return sorted((key for key in keys if at_most is None or key[0] <= at_most), reverse=True)

    def _finished(self, at_most: Key | None = None) -> list[Key]:
        keys = [key for key in self._keys() if at_most is None or key <= at_most]
        return [key for key in keys if not is_unfinished(self._place(key))]

    def _listed(self, at_most: int | None = None) -> list[Path]:
        """The directories that bear a checkpoint's name, newest first."""
        return [self._place(key) for key in self._keys(at_most)]

    def _first_valid(self, listed: Sequence[Path]) -> NewestCheckpoint:
        passed_over: list[SkippedCheckpoint] = []
        for path in listed:
            try:
                return NewestCheckpoint(
                    DirectoryCheckpoint(path, self._verified(path)), tuple(passed_over)
                )
            except (CorruptError, NewerFormatError) as error:
                passed_over.append(SkippedCheckpoint(str(path), str(error)))
            except OSError as error:
                passed_over.append(SkippedCheckpoint(str(path), f"it cannot be read: {error}"))
        return NewestCheckpoint(None, tuple(passed_over))

    def _verified(self, path: Path) -> Manifest:
        """The manifest of this directory, all of whose files have been read and verified.

        Raises CorruptError, NewerFormatError or OSError.
        """
        seen = traces(path)
        manifest = read_manifest(path)
        for entry in manifest.files:
            verify_file(path / entry.file, entry)
        self._proven[path] = seen
        return manifest

    def _valid(self, path: Path) -> Manifest | None:
        """The manifest of the valid checkpoint in this place.

        Raises OSError if that cannot be told, NewerFormatError if it is not ours to tell.
        """
        try:
            return self._verified(path) if path.is_dir() else None
        except CorruptError:
            return None

    def _is_valid(self, path: Path) -> bool:
        try:
            return self._proven.get(path) == traces(path) or self._valid(path) is not None
        except (OSError, NewerFormatError):
            return False

    def _remove(self, key: Key) -> bool:
        """Remove a checkpoint; False: it was pinned in the last moment, or is not ours."""
        path = self._place(key)
        if is_newer(path) or not pins.revoke(self.root, path, key, time.time()):
            return False
        shutil.rmtree(path)
        self._proven.pop(path, None)
        return True

    def _remove_unfinished(self) -> None:
        """Remove what killed writers left, as soon as a newer checkpoint is finished.

        Not earlier: parts are written without the lock, so what looks left may be under way.
        What cannot be removed now is left for the next time.
        """
        with contextlib.suppress(OSError):
            keys = self._keys()
            unfinished = [key for key in keys if is_unfinished(self._place(key))]
            for key in unfinished:
                if is_outdated(key, set(keys).difference(unfinished)):
                    shutil.rmtree(self._place(key), ignore_errors=True)

    def _write(
        self, path: Path, manifest: Manifest, parts: Mapping[str, CheckpointFile]
    ) -> Manifest:
        if path.exists():
            shutil.rmtree(path)
        with new_directory(path) as directory:
            files = []
            for name, part in parts.items():
                files.append(write_file(directory, name, part.chunks).entry(name, part.ranks))
            manifest = msgspec.structs.replace(manifest, files=tuple(files))
            write_file(directory, MANIFEST_FILE, [manifests.encode(manifest)])
        self._proven[path] = traces(path)
        return manifest


def _told(part: CheckpointFile) -> Iterator[Bytes]:
    """The chunks of a part, each told of when the next one is asked for."""
    for chunk in part.chunks:
        yield chunk
        part.told(memoryview(chunk).nbytes)


def _seen(path: Path, key: Key) -> CheckpointInfo:
    """What a look at this directory tells."""
    manifest, reason = look_at(path)
    unfinished = bool(reason) and is_unfinished(path)
    return CheckpointInfo(
        str(path), *key, manifest, reason, unfinished, bool(reason) and is_newer(path)
    )
