"""Checkpoints in a local or shared directory.

    <root>/step-<step>-g<generation>/   one checkpoint: plain safetensors files and manifest.json
    <root>/.lock                        held while a process writes, commits or prunes

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
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rekindle.checkpoints import manifest as manifests
from rekindle.checkpoints import parts as shared
from rekindle.checkpoints.files import (
    explained,
    load_file,
    locked,
    make_directories,
    new_directory,
    verify_file,
    write_file,
)
from rekindle.checkpoints.format import Bytes, checksum
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.checkpoints.place import (
    Key,
    Traces,
    committed,
    entry_of,
    is_outdated,
    is_unfinished,
    key_of,
    name_of,
    read_manifest,
    traces,
)
from rekindle.errors import CheckpointError, CorruptError, UsageError


class Part(msgspec.Struct, frozen=True):
    """What one file of a checkpoint is to hold, and the ranks whose state that is.

    The chunks may not change until the write has returned.
    """

    chunks: Sequence[Bytes]
    ranks: tuple[int, ...]


class Written(msgspec.Struct, frozen=True):
    """A committed checkpoint, its size in bytes without the manifest.

    existed: it had been committed before; nothing was written.
    """

    path: Path
    bytes: int
    existed: bool


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was found; newest() has proved all its bytes, find() has read none."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> memoryview:
        """The bytes of this file, in private memory; they were verified there.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        entry = entry_of(self.path, self.manifest, name)
        with explained("read", self.path / name):
            return load_file(self.path / name, entry)


class PassedOver(msgspec.Struct, frozen=True):
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


class Found(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, if any, and the newer ones that were passed over for it."""

    checkpoint: Checkpoint | None
    passed_over: tuple[PassedOver, ...]


class DirectoryStore:
    """All checkpoints of one job, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # What this process wrote or verified is not read again by prune() while it is unchanged.
        self._proven: dict[Path, Traces] = {}

    def write(self, manifest: Manifest, parts: Mapping[str, Part]) -> Written:
        """Write and commit a checkpoint; manifest.files is filled in from the parts (file names).

        Waits while another process writes or prunes here. A valid checkpoint of the same step and
        generation is left as it is; anything else in its place is written over.
        Raises CheckpointError, with nothing of this checkpoint left, if it cannot be written.
        """
        path = self._place((manifest.step, manifest.generation))
        _check_writable(manifest, parts)
        with explained("write the checkpoint", path):
            make_directories(self.root)
            with locked(self.root):
                there = self._valid(path)
                if there is None:
                    self._remove_unfinished()
                    there = self._write(path, manifest, parts)
                    self._remove_unfinished()
                    return Written(path, _bytes(there), existed=False)
        return _existing(path, there, manifest.job_id)

    def write_part(self, step: int, generation: int, name: str, part: Part) -> FileEntry:
        """Write one file of a checkpoint that counts once it is committed, with its other parts.

        A file of that name, whole or torn, is written over, unless a committed checkpoint holds it
        and it is intact: then it is left as it is, and its entry returned.
        Raises CheckpointError, with nothing of this part left and the others' untouched, if it
        cannot be written, or if the checkpoint has been committed without such a part.
        """
        path = self._place((step, generation))
        shared.check_part(step, generation, name, part.ranks)
        with explained("write", path / name):
            return shared.write_part(path, name, part.chunks, part.ranks)

    def commit(self, manifest: Manifest) -> Written:
        """Make a checkpoint of the parts that manifest.files names, as write_part() returned them.

        Their sizes are checked; their bytes, which their writers wrote through, are not read again.
        A checkpoint of the same step and generation that is complete is left as it is.
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
                if there is None:
                    shared.write_manifest(path, manifest)
                    self._proven[path] = traces(path)
                    self._remove_unfinished()
                    return Written(path, _bytes(manifest), existed=False)
        return _existing(path, there, manifest.job_id)

    def newest(self, *, at_most: int | None = None) -> Found:
        """The newest checkpoint (highest step, then generation) that is valid in every byte.

        at_most: the highest step that is wanted.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            listed = self._listed(at_most)
            while True:
                found = self._first_valid(listed)
                again = self._listed(at_most)
                if found.checkpoint or set(listed) <= set(again):
                    return found
                # They were pruned while they were read, so a newer one has been committed.
                listed = again

    def find(self, step: int, generation: int) -> Checkpoint | None:
        """The checkpoint of this step and generation, if it has all its files.

        Their sizes are looked at, their bytes are not: who reads a file has it verified there.
        Raises CheckpointError if its directory exists but cannot be read.
        """
        path = self._place((step, generation))
        with explained("read", path):
            manifest = committed(path)
        return Checkpoint(path, manifest) if manifest else None

    def keys(self, *, at_most: Key | None = None) -> list[Key]:
        """Step and generation of all finished checkpoints, newest first; nothing in them is read.

        at_most: the newest that is wanted.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            keys = [key for key in self._keys() if at_most is None or key <= at_most]
            return [key for key in keys if not is_unfinished(self._place(key))]

    def prune(self, keep: int) -> tuple[Path, ...]:
        """Remove all that is older than the newest `keep` valid checkpoints.

        Also what killed writers left, if a newer checkpoint is finished.
        Invalid checkpoints that are newer stay as evidence until they are old. Removes no
        checkpoint while there are fewer valid ones. Returns the checkpoints removed.
        Raises UsageError if keep is less than 1, CheckpointError if one cannot be removed.
        """
        if keep < 1:
            raise UsageError(f"keep is {keep}: at least 1 checkpoint must be kept")
        with explained("prune", self.root):
            if not self._listed():
                return ()
            with locked(self.root):
                self._remove_unfinished()
                old = self._older_than_valid(keep)
                for path in old:
                    # The manifest first: a checkpoint that is half removed must not count.
                    (path / MANIFEST_FILE).unlink(missing_ok=True)
                    shutil.rmtree(path)
                    self._proven.pop(path, None)
                return old

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

    def _listed(self, at_most: int | None = None) -> list[Path]:
        """The directories that bear a checkpoint's name, newest first."""
        return [self._place(key) for key in self._keys(at_most)]

    def _first_valid(self, listed: Sequence[Path]) -> Found:
        passed_over: list[PassedOver] = []
        for path in listed:
            try:
                return Found(Checkpoint(path, self._verified(path)), tuple(passed_over))
            except CorruptError as error:
                passed_over.append(PassedOver(path, str(error)))
            except OSError as error:
                passed_over.append(PassedOver(path, f"it cannot be read: {error}"))
        return Found(None, tuple(passed_over))

    def _verified(self, path: Path) -> Manifest:
        """The manifest of this directory, all of whose files have been read and verified.

        Raises CorruptError or OSError.
        """
        seen = traces(path)
        manifest = read_manifest(path)
        for entry in manifest.files:
            verify_file(path / entry.name, entry)
        self._proven[path] = seen
        return manifest

    def _valid(self, path: Path) -> Manifest | None:
        """The manifest of the valid checkpoint in this place; OSError if that cannot be told."""
        try:
            return self._verified(path) if path.is_dir() else None
        except CorruptError:
            return None

    def _is_valid(self, path: Path) -> bool:
        try:
            return self._proven.get(path) == traces(path) or self._valid(path) is not None
        except OSError:
            return False

    def _older_than_valid(self, keep: int) -> tuple[Path, ...]:
        """What comes after the newest `keep` valid checkpoints."""
        listed = self._listed()
        valid = 0
        for index, path in enumerate(listed):
            valid += self._is_valid(path)
            if valid == keep:
                return tuple(listed[index + 1 :])
        return ()

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

    def _write(self, path: Path, manifest: Manifest, parts: Mapping[str, Part]) -> Manifest:
        if path.exists():
            shutil.rmtree(path)
        with new_directory(path) as directory:
            files = []
            for name, part in parts.items():
                size, digest = write_file(directory, name, part.chunks)
                files.append(FileEntry(name=name, bytes=size, checksum=digest, ranks=part.ranks))
            manifest = msgspec.structs.replace(manifest, files=tuple(files))
            write_file(directory, MANIFEST_FILE, [manifests.encode(manifest)])
        self._proven[path] = traces(path)
        return manifest


def _existing(path: Path, there: Manifest, job_id: str) -> Written:
    """The checkpoint that was found in its place; CheckpointError if it is another job's."""
    if there.job_id != job_id:
        raise CheckpointError(
            f"{path} is a checkpoint of job {there.job_id!r}: "
            f"give job {job_id!r} a directory of its own"
        )
    return Written(path, _bytes(there), existed=True)


def _check_writable(manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Raise CheckpointError, before anything is written, if the manifest will be impossible."""
    nothing = checksum([])
    files = tuple(
        FileEntry(name=name, bytes=0, checksum=nothing, ranks=part.ranks)
        for name, part in parts.items()
    )
    manifests.encode(msgspec.structs.replace(manifest, files=files))


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files)
