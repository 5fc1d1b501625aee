"""Checkpoints in a local or shared directory.

    <root>/step-<step>-g<generation>/   one checkpoint: plain safetensors files and manifest.json
    <root>/.lock                        held while a process writes or prunes

A checkpoint is written in its own place, the manifest last. Nothing is renamed, so that this holds
on file systems where renaming is a copy; a torn manifest is recognised by its own checksum.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rekindle.checkpoints import manifest as manifests
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
from rekindle.errors import CheckpointError, CorruptError, UsageError

# Only as write() spells it, so that a step and generation have one place.
_NAME = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,})-g([0-9]{6}|[1-9][0-9]{6,})")

# What changes with any change of a file: name, inode, bytes, time of change.
Traces = tuple[tuple[str, int, int, int], ...]


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
    """A checkpoint that was found valid."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> memoryview:
        """The bytes of this file, in private memory; they were verified there.

        Raises CorruptError if they are not what was written, CheckpointError if unreadable.
        """
        for entry in self.manifest.files:
            if entry.name == name:
                with explained("read", self.path / name):
                    return load_file(self.path / name, entry)
        names = ", ".join(entry.name for entry in self.manifest.files)
        raise CheckpointError(f"{self.path} has no file {name!r}; it has: {names or 'none'}")


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
        path = self.root / f"step-{manifest.step:010d}-g{manifest.generation:06d}"
        _check_writable(manifest, parts)
        with explained("write the checkpoint", path):
            make_directories(self.root)
            with locked(self.root):
                committed = self._committed(path)
                if committed is None:
                    self._remove_unfinished()
                    committed = self._commit(path, manifest, parts)
                    return Written(path, _bytes(committed), existed=False)
        if committed.job_id != manifest.job_id:
            raise CheckpointError(
                f"{path} is a checkpoint of job {committed.job_id!r}: "
                f"give job {manifest.job_id!r} a directory of its own"
            )
        return Written(path, _bytes(committed), existed=True)

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

    def steps(self, *, at_most: int | None = None) -> list[int]:
        """The steps of all finished checkpoints, newest first; what is in them is not looked at.

        Raises CheckpointError if the directory exists but cannot be read.
        """
        with explained("read", self.root):
            finished = (path for path in self._listed(at_most) if not _is_unfinished(path))
            found = [_NAME.fullmatch(path.name) for path in finished]
        return list(dict.fromkeys(int(match[1]) for match in found if match))

    def prune(self, keep: int) -> tuple[Path, ...]:
        """Remove all that is older than the newest `keep` valid checkpoints, and unfinished writes.

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

    def _listed(self, at_most: int | None = None) -> list[Path]:
        """The directories that bear a checkpoint's name, newest first."""
        keys = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    keys.append((int(match[1]), int(match[2]), entry.name))
        keys.sort(reverse=True)
        return [self.root / name for step, _, name in keys if at_most is None or step <= at_most]

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
        traces = _traces(path)
        try:
            manifest = manifests.decode((path / MANIFEST_FILE).read_bytes())
        except FileNotFoundError as error:
            raise CorruptError("no manifest: the write was not finished") from error
        named = _NAME.fullmatch(path.name)
        if not named or (int(named[1]), int(named[2])) != (manifest.step, manifest.generation):
            raise CorruptError(
                f"the manifest is of step {manifest.step}, generation {manifest.generation}, "
                "not of this directory"
            )
        for entry in manifest.files:
            verify_file(path / entry.name, entry)
        self._proven[path] = traces
        return manifest

    def _committed(self, path: Path) -> Manifest | None:
        """The manifest of the valid checkpoint in this place; OSError if that cannot be told."""
        try:
            return self._verified(path) if path.is_dir() else None
        except CorruptError:
            return None

    def _is_valid(self, path: Path) -> bool:
        try:
            return self._proven.get(path) == _traces(path) or self._committed(path) is not None
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
        """Remove what killed writers left; under the lock there is no other unfinished write."""
        for path in self._listed():
            if _is_unfinished(path):
                shutil.rmtree(path, ignore_errors=True)

    def _commit(self, path: Path, manifest: Manifest, parts: Mapping[str, Part]) -> Manifest:
        if path.exists():
            shutil.rmtree(path)
        with new_directory(path) as directory:
            files = []
            for name, part in parts.items():
                size, digest = write_file(directory, name, part.chunks)
                files.append(FileEntry(name=name, bytes=size, checksum=digest, ranks=part.ranks))
            manifest = msgspec.structs.replace(manifest, files=tuple(files))
            write_file(directory, MANIFEST_FILE, [manifests.encode(manifest)])
        self._proven[path] = _traces(path)
        return manifest


def _check_writable(manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Raise CheckpointError, before anything is written, if the manifest will be impossible."""
    nothing = checksum([])
    files = tuple(
        FileEntry(name=name, bytes=0, checksum=nothing, ranks=part.ranks)
        for name, part in parts.items()
    )
    manifests.encode(msgspec.structs.replace(manifest, files=files))


def _is_unfinished(path: Path) -> bool:
    """Whether no manifest was written here; False if that cannot be told."""
    try:
        return not (path / MANIFEST_FILE).stat().st_size
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files)


def _traces(path: Path) -> Traces:
    """By these, an unchanged directory is known without reading its files."""
    with os.scandir(path) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in found))
