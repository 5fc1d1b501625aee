"""Checkpoints in a local or shared directory.

    <root>/step-<step>-g<generation>/   one checkpoint: plain safetensors files and manifest.json
    <root>/.lock                        held while a process writes, commits or prunes
    <root>/pins/                        pins, which protect checkpoints from pruning

A writer writes a checkpoint directly to its final path, and writes the manifest last. It does not
rename any file, because some file systems copy a file to rename it. The manifest's own checksum
shows a torn manifest.

One process can write a checkpoint alone, with write(). Several processes, on any machines that
share the directory, can each write one file with write_part(). They do not hold the lock while they
write. When all files are written, one process commits the checkpoint with commit().
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
    Traces,
    check_sizes,
    committed,
    entry_of,
    is_newer,
    is_outdated,
    is_unfinished,
    key_of,
    name_of,
    read_manifest,
    traces,
)
from rekindle.checkpoints.files import (
    explained,
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
from rekindle.states import StateId


class DirectoryCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in a directory. Implements `rekindle.checkpoints.store.Checkpoint`."""

    path: Path
    manifest: Manifest

    @property
    def location(self) -> str:
        """Return the path of its directory."""
        return str(self.path)

    def read_into(self, name: str, begin: int, view: memoryview) -> None:
        """Fill the view with this file's bytes, starting at `begin`. Their blocks are verified.

        Raises CorruptError if they are not what was written. CheckpointError if unreadable, or if
        the file does not have these bytes.
        """
        entry = entry_of(self.path, self.manifest, name)
        check_range(entry, begin, len(view))
        with explained("read", self.path / entry.file):
            load_into(self.path / entry.file, entry, begin, view)

    def read_range(self, name: str, begin: int, end: int) -> memoryview:
        """Return the unverified bytes of this file from `begin` to `end`; fewer if it ends before.

        Raises MissingError, CorruptError if it is not a plain file, CheckpointError if unreadable.
        """
        entry = entry_of(self.path, self.manifest, name)
        with explained("read", self.path / entry.file):
            return read_range(self.path / entry.file, begin, end)


class DirectoryStore:
    """All checkpoints of one job, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # prune() does not read checkpoints again that this process wrote or verified, if they are
        # unchanged.
        self._proven: dict[Path, Traces] = {}

    @property
    def location(self) -> str:
        """Return the path of the directory."""
        return str(self.root)

    def write(self, manifest: Manifest, parts: Mapping[str, CheckpointFile]) -> Written:
        """Write and commit a checkpoint. manifest.files is filled in from the parts (file names).

        The method waits while another process writes or prunes here. It does not change a valid
        checkpoint of the same step and generation. It replaces anything else at the checkpoint's
        path.
        Raises CheckpointError if it cannot be written. Nothing of this checkpoint remains then.
        """
        path = self._place(manifest.state)
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
        """Write one file of a checkpoint. The checkpoint is valid after commit().

        The method replaces an existing file of that name, complete or torn. If a committed
        checkpoint holds the file and it is intact, the method changes nothing and returns its
        entry.
        Raises CheckpointError if it cannot be written, or if the checkpoint has been committed
        without such a part. Nothing of this part remains then, and the other parts are unchanged.
        """
        path = self._place(StateId(step, generation))
        shared.check_part(step, generation, name, part.ranks)
        with explained("write", path / name):
            return shared.write_part(path, name, _reported_chunks(part), part.ranks)

    def commit(self, manifest: Manifest) -> Written:
        """Commit the parts that manifest.files names, as write_part() returned them.

        The method checks the sizes of the parts. It reads a part again only if another writer
        replaced it, because each writer has written its bytes through to the disk. It does not
        change a checkpoint of the same step and generation that has the same files or is valid.
        Raises CheckpointError if a part is missing or has another size or other bytes, or if the
        manifest cannot be written. All parts are unchanged then.
        """
        path = self._place(manifest.state)
        if not manifest.files:
            raise CheckpointError(f"cannot commit {path}: the manifest does not list a file")
        with explained("commit", path):
            make_directories(self.root)
            with locked(self.root):
                there = committed(path)
                # Another writer may have committed other files. They remain valid if they can be
                # read.
                if there and there.files != manifest.files and not self._is_valid(path):
                    there = None
                if there is None:
                    shared.write_manifest(path, manifest)
                    self._proven[path] = traces(path)
                    self._remove_unfinished()
                    return Written(str(path), bytes_of(manifest), existed=False)
        return existing(str(path), there, manifest.job_id)

    def newest(self, *, at_most: int | None = None) -> NewestCheckpoint:
        """Return the newest checkpoint (highest step, then generation) with all bytes verified.

        at_most: the highest step that is allowed.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            return newest_of(lambda: self._keys(at_most), self._first_valid)

    def find(self, step: int, generation: int) -> DirectoryCheckpoint | None:
        """Return the checkpoint of this step and generation, or None unless all its files exist.

        The method checks the sizes of the files, not their bytes. read() verifies the bytes.
        Raises CheckpointError if its directory exists but cannot be read.
        """
        path = self._place(StateId(step, generation))
        with explained("read", path):
            manifest = committed(path)
        return DirectoryCheckpoint(path, manifest) if manifest else None

    def keys(self, *, at_most: StateId | None = None) -> list[StateId]:
        """Return step and generation of all finished checkpoints, newest first. No file is read.

        at_most: the newest key that is allowed.
        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            return self._finished(at_most)

    def survey(self) -> list[CheckpointInfo]:
        """Describe each directory with a checkpoint's name, usable or not, newest first.

        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            keys = self._keys()
        return [_checkpoint_info(self._place(key), key) for key in keys]

    def at(self, manifest: Manifest) -> DirectoryCheckpoint:
        """Return the checkpoint of this manifest in this store. The method reads no file."""
        return DirectoryCheckpoint(self._place(manifest.state), manifest)

    def prune(self, retention: Retention) -> tuple[StateId, ...]:
        """Remove the checkpoints that the retention does not keep. Return them, newest first.

        The method never removes the newest valid checkpoint or a pinned one. If a newer checkpoint
        is finished, the method also removes the files of writers that were killed. It also removes
        pins that have expired or whose checkpoint is gone.
        Raises CheckpointError if a checkpoint cannot be removed.
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
        """Protect a checkpoint from pruning. Return False, without a change, if it does not exist.

        After this has returned True, no process prunes the checkpoint while the pin holds. This is
        not guaranteed on a file system without locks.
        Raises CheckpointError: the directory cannot be written.
        """
        with explained("pin a checkpoint in", self.root):
            return pins.add(self.root, self._place(pin.key), pin)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin. A missing pin is not an error. Raises CheckpointError."""
        with explained("remove a pin from", self.root):
            pins.remove(self.root, pin)

    def pins(self) -> list[Pin]:
        """Return all pins, also expired ones. Raises CheckpointError: they cannot be read."""
        with explained("read the pins of", self.root):
            return pins.listed(self.root)

    def _place(self, key: StateId) -> Path:
        return self.root / name_of(*key)

    def _keys(self, at_most: int | None = None) -> list[StateId]:
        """Return the keys of the directories that have a checkpoint's name, newest first."""
        keys = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                key = key_of(entry.name)
                if key and entry.is_dir(follow_symlinks=False):
                    keys.append(key)
        return sorted((key for key in keys if at_most is None or key[0] <= at_most), reverse=True)

    def _finished(self, at_most: StateId | None = None) -> list[StateId]:
        keys = [key for key in self._keys() if at_most is None or key <= at_most]
        return [key for key in keys if not is_unfinished(self._place(key))]

    def _first_valid(self, listed: Sequence[StateId]) -> NewestCheckpoint:
        passed_over: list[SkippedCheckpoint] = []
        for path in map(self._place, listed):
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
        """Read and verify all files of this directory, and return its manifest.

        Raises CorruptError, NewerFormatError or OSError.
        """
        now = traces(path)
        manifest = read_manifest(path)
        for entry in manifest.files:
            verify_file(path / entry.file, entry)
        self._proven[path] = now
        return manifest

    def _valid(self, path: Path) -> Manifest | None:
        """Return the manifest of the valid checkpoint at this path, or None.

        Raises OSError: the directory cannot be read. NewerFormatError: a later version wrote the
        manifest.
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

    def _remove(self, key: StateId) -> bool:
        """Remove a checkpoint. Return False if it is pinned now, or a later version wrote it."""
        path = self._place(key)
        if is_newer(path) or not pins.revoke(self.root, path, key, time.time()):
            return False
        shutil.rmtree(path)
        self._proven.pop(path, None)
        return True

    def _remove_unfinished(self) -> None:
        """Remove the files of writers that were killed, after a newer checkpoint is finished.

        Writers write parts without the lock. Before a newer checkpoint is finished, a writer may
        still be writing such files. The method retries files that it cannot remove at its next
        call.
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


def _reported_chunks(part: CheckpointFile) -> Iterator[Bytes]:
    """Yield the chunks of a part. Report each chunk when the next one is requested."""
    for chunk in part.chunks:
        yield chunk
        part.on_bytes(memoryview(chunk).nbytes)


def _checkpoint_info(path: Path, key: StateId) -> CheckpointInfo:
    """Describe the checkpoint in this directory by its manifest and the sizes of its files."""
    manifest, reason, newer = None, "", False
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except (CorruptError, NewerFormatError) as error:
        reason, newer = str(error), isinstance(error, NewerFormatError)
    except OSError as error:
        reason = f"it cannot be read: {error}"
    unfinished = bool(reason) and is_unfinished(path)
    return CheckpointInfo(str(path), *key, manifest, reason, unfinished, newer)
