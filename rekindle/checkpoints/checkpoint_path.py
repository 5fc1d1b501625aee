"""The path of one checkpoint: its name, and the facts that its manifest and file sizes show.

This module reads manifests only. Other modules verify the bytes of the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rekindle.checkpoints import manifest as manifests
from rekindle.checkpoints.files import check_size
from rekindle.checkpoints.manifest import MANIFEST_FILE, FileEntry, Manifest
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError
from rekindle.states import StateId

# Matches only the form that name_of() writes, so that a step and generation have one path.
_NAME = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,})-g([0-9]{6}|[1-9][0-9]{6,})")

UNFINISHED: Final = "there is no manifest, because the write did not finish"

# Name, inode, bytes and time of change of each file. Any change of a file changes one of them.
Traces = tuple[tuple[str, int, int, int], ...]


def name_of(step: int, generation: int) -> str:
    return f"step-{step:010d}-g{generation:06d}"


def key_of(name: str) -> StateId | None:
    """Return the step and generation in this name, or None if it is not a checkpoint's name."""
    match = _NAME.fullmatch(name)
    return StateId(int(match[1]), int(match[2])) if match else None


def is_outdated(unfinished: StateId, finished: Iterable[StateId]) -> bool:
    """Return whether a newer checkpoint is finished, so that no process needs the unfinished one.

    A finished checkpoint of an earlier generation does not outdate it. If a job cannot use that
    checkpoint, it continues from an earlier one. It then writes lower steps in a later generation.
    """
    return any(key > unfinished and key[1] >= unfinished[1] for key in finished)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in this directory.

    Raises CorruptError: there is no manifest of this step and generation. OSError: it is
    unreadable.
    """
    try:
        data = (path / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(UNFINISHED) from error
    return manifest_of(key_of(path.name), data)


def manifest_of(key: StateId | None, data: bytes) -> Manifest:
    """Return the manifest in these bytes.

    Raises CorruptError: they are not a manifest of this step and generation. NewerFormatError: a
    later version of Rekindle wrote it.
    """
    manifest = manifests.decode(data)
    if key != manifest.state:
        raise CorruptError(
            f"the manifest belongs to step {manifest.step}, generation {manifest.generation}; "
            "this location belongs to another checkpoint"
        )
    return manifest


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise CorruptError unless each file exists with its size in the manifest."""
    for entry in manifest.files:
        check_size(path / entry.file, entry)


def committed(path: Path) -> Manifest | None:
    """Return the manifest of this path, or None unless its files exist with their sizes.

    Raises OSError: the directory cannot be read. NewerFormatError: a later version wrote the
    manifest.
    """
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CorruptError:
        return None
    return manifest


def is_newer(path: Path) -> bool:
    """Return whether a later version of Rekindle wrote the manifest here."""
    try:
        read_manifest(path)
    except NewerFormatError:
        return True
    except (CorruptError, OSError):
        pass
    return False


def entry_of(location: object, manifest: Manifest, name: str) -> FileEntry:
    """Return the manifest's entry of this file. Raises CheckpointError if it does not have one."""
    for entry in manifest.files:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in manifest.files)
    raise CheckpointError(f"{location} has no file {name!r}; it has: {names or 'none'}")


def is_unfinished(path: Path) -> bool:
    """Return whether the manifest is missing or empty; False if it cannot be read."""
    try:
        return not (path / MANIFEST_FILE).stat().st_size
    except FileNotFoundError:
        return True
    except OSError:
        return False


def traces(path: Path) -> Traces:
    """Return values of the directory's files that show a change without reading the files."""
    with os.scandir(path) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in found))
