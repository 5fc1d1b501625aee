"""A checkpoint whose files several processes write, and which one of them commits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rekindle.checkpoints import manifest as manifests
from rekindle.checkpoints.block_checksums import Sums
from rekindle.checkpoints.checkpoint_path import check_sizes, committed, entry_of
from rekindle.checkpoints.files import (
    check_in_place,
    locked,
    make_directories,
    new_file,
    opened_directory,
    sync_directory,
    verify_file,
    write_through,
)
from rekindle.checkpoints.format import Bytes
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.checkpoints.store import CheckpointFile, check_writable
from rekindle.errors import CheckpointError, CorruptError

# Prefix of a mark for a part that was replaced. Another process may rely on its earlier bytes.
REPLACED: Final = ".replaced-"


def check_part(step: int, generation: int, name: str, ranks: tuple[int, ...]) -> None:
    """Raise CheckpointError, before any file is created, if a manifest cannot hold this part."""
    possible = Manifest(
        job_id="",
        step=step,
        generation=generation,
        world_size=1,
        framework="",
        created=0.0,
        writer="",
        rekindle="",
    )
    check_writable(possible, {name: CheckpointFile((), ranks)})


def write_part(path: Path, name: str, chunks: Iterable[Bytes], ranks: tuple[int, ...]) -> FileEntry:
    """Write this file of the checkpoint in `path`, unless it is committed and intact.

    Raises CheckpointError or OSError.
    """
    make_directories(path.parent)
    while True:
        # Without the lock: the file may be long, and other writers wait for the lock to create
        # theirs.
        there = committed(path)
        if there and (entry := _intact(path, there, name)):
            return entry
        if written := _replace(path, there, name, chunks):
            return written.entry(name, ranks)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Commit the parts in `path`. The caller holds the lock.

    The function reads a part that was replaced, because its bytes may no longer match the manifest.
    Raises CheckpointError or OSError.
    """
    data = manifests.encode(manifest)
    marks = {entry.file: path / f"{REPLACED}{entry.file}" for entry in manifest.files}
    try:
        check_sizes(path, manifest)
        for entry in manifest.files:
            if marks[entry.file].exists():
                verify_file(path / entry.file, entry)
    except CorruptError as error:
        raise CheckpointError(f"cannot commit {path}: {error}") from error
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    with opened_directory(path) as directory:
        os.fsync(directory)
        with new_file(directory, MANIFEST_FILE) as file:
            write_through(file, [data])
            os.fsync(directory)
            sync_directory(path.parent)
    for mark in marks.values():
        mark.unlink(missing_ok=True)


def _intact(path: Path, manifest: Manifest, name: str) -> FileEntry | None:
    """Return the entry of this file of a committed checkpoint, or None if the file is damaged."""
    entry = entry_of(path, manifest, name)
    try:
        verify_file(path / entry.file, entry)
    except CorruptError:
        return None
    return entry


def _replace(
    path: Path, manifest: Manifest | None, name: str, chunks: Iterable[Bytes]
) -> Sums | None:
    """Write this file. Return None if the committed manifest is no longer `manifest`.

    The function holds the lock until it has created the file. Then the file is new, no other writer
    has it open, and the directory is not a committed checkpoint.
    """
    with contextlib.ExitStack() as stack:
        with locked(path.parent):
            if committed(path) != manifest:
                return None
            make_directories(path)
            # The manifest is removed first: a checkpoint whose file is being replaced must not be
            # valid.
            (path / MANIFEST_FILE).unlink(missing_ok=True)
            if os.path.lexists(path / name):
                (path / f"{REPLACED}{name}").touch()
                (path / name).unlink()
            directory = stack.enter_context(opened_directory(path))
            file = stack.enter_context(new_file(directory, name))
        written = write_through(file, chunks)
        check_in_place(file, path / name)
        os.fsync(directory)
    return written
