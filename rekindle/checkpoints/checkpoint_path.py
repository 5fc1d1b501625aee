"""The place of one checkpoint: its name, and what a look at it tells.

Whether a checkpoint is valid in every byte is asked elsewhere; here no file but a manifest is read.
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

# Only as name_of() spells it, so that a step and generation have one place.
_NAME = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,})-g([0-9]{6}|[1-9][0-9]{6,})")

UNFINISHED: Final = "no manifest: the write was not finished"

# A checkpoint's step and generation: the higher, the newer.
Key = tuple[int, int]

# What changes with any change of a file: name, inode, bytes, time of change.
Traces = tuple[tuple[str, int, int, int], ...]


def name_of(step: int, generation: int) -> str:
    return f"step-{step:010d}-g{generation:06d}"


def key_of(name: str) -> Key | None:
    """The step and generation that this name tells; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_outdated(unfinished: Key, finished: Iterable[Key]) -> bool:
    """Whether an unfinished checkpoint is older than a finished one, so that nobody waits for it.

    One of an earlier generation outdates nothing: a job that cannot use it goes on from before it
    and writes lower steps than that, in a later generation.
    """
    return any(key > unfinished and key[1] >= unfinished[1] for key in finished)


def read_manifest(path: Path) -> Manifest:
    """The manifest in this directory.

    Raises CorruptError if there is none of this step and generation, OSError if it is unreadable.
    """
    try:
        data = (path / MANIFEST_FILE).read_bytes()
    except FileNotFoundError as error:
        raise CorruptError(UNFINISHED) from error
    return manifest_of(key_of(path.name), data)


def manifest_of(key: Key | None, data: bytes) -> Manifest:
    """The manifest in these bytes; CorruptError if it is none of this step and generation."""
    manifest = manifests.decode(data)
    if key != (manifest.step, manifest.generation):
        raise CorruptError(
            f"the manifest is of step {manifest.step}, generation {manifest.generation}, "
            "not of this place"
        )
    return manifest


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise CorruptError unless each file is there with the size that the manifest says."""
    for entry in manifest.files:
        check_size(path / entry.file, entry)


def look_at(path: Path) -> tuple[Manifest | None, str]:
    """The manifest in this directory, if it can be read, and why the checkpoint cannot be used."""
    manifest = None
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except (CorruptError, NewerFormatError) as error:
        return manifest, str(error)
    except OSError as error:
        return manifest, f"it cannot be read: {error}"
    return manifest, ""


def committed(path: Path) -> Manifest | None:
    """The manifest of the checkpoint in this place, if its files are there with their sizes.

    Raises OSError if that cannot be told, NewerFormatError if it is not ours to tell.
    """
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CorruptError:
        return None
    return manifest


def is_newer(path: Path) -> bool:
    """Whether a later version of Rekindle wrote the manifest here."""
    try:
        read_manifest(path)
    except NewerFormatError:
        return True
    except (CorruptError, OSError):
        pass
    return False


def entry_of(location: object, manifest: Manifest, name: str) -> FileEntry:
    """What the manifest of this place says of the file; CheckpointError if it has none such."""
    for entry in manifest.files:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in manifest.files)
    raise CheckpointError(f"{location} has no file {name!r}; it has: {names or 'none'}")


def is_unfinished(path: Path) -> bool:
    """Whether no manifest was written here; False if that cannot be told."""
    try:
        return not (path / MANIFEST_FILE).stat().st_size
    except FileNotFoundError:
        return True
    except OSError:
        return False


def traces(path: Path) -> Traces:
    """By these, an unchanged directory is known without reading its files."""
    with os.scandir(path) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in found))
