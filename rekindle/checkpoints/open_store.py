"""Opens a store of checkpoints, or a pointer, by its location."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.files import (
    explained,
    locked,
    make_directories,
    opened_directory,
    sync_directory,
    write_file,
)
from rekindle.checkpoints.location import parse
from rekindle.checkpoints.store import Checkpoint, CheckpointStore
from rekindle.errors import CheckpointError, UsageError


class Pointer(Protocol):
    """Where the text is. Every method raises CheckpointError: it cannot be read, or written."""

    @property
    def location(self) -> str:
        """As people and tools name it."""

    def read(self) -> bytes | None:
        """The text; None: there is none."""

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""


class FilePointer:
    """A pointer that is a file; who reads it sees the old or the new text, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        """Its absolute path."""
        return str(self._path)

    def read(self) -> bytes | None:
        """The text; None: there is none."""
        with explained("read", self._path):
            try:
                return self._path.read_bytes()
            except FileNotFoundError:
                return None

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""
        with explained("write", self._path):
            make_directories(self._path.parent)
            with locked(self._path.parent):
                if self.read() != old:
                    return False
                new = self._path.with_name(f".{self._path.name}.new")
                new.unlink(missing_ok=True)  # of a writer that was killed
                with opened_directory(new.parent) as directory:
                    write_file(directory, new.name, [data])
                new.replace(self._path)
                sync_directory(new.parent)
                return True


def open_store(location: str, environment: Mapping[str, str] = os.environ) -> CheckpointStore:
    """Return the store at a location: a folder or an s3:// URL. It reads nothing yet.

    location: an absolute path or s3://bucket/prefix. environment: variables with the credentials
    of the store.
    Raises UsageError: the location is not valid (a relative path is not), boto3 or the file of
    authorities is missing, or the environment has only a part of the credentials.
    """
    where = parse(location)
    if isinstance(where, Path):
        return DirectoryStore(where)
    # boto3 takes its time to import, and those with a directory need not have it.
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.store import S3Store

    return S3Store(where, connect(where, environment))


def find_checkpoint(location: str, key: Key) -> tuple[CheckpointStore, Checkpoint]:
    """Open a store and find its checkpoint of this step and generation.

    Raises CheckpointError: the store has none, or cannot be read.
    """
    store, (step, generation) = open_store(location), key
    found = store.find(step, generation)
    if found is None:
        raise CheckpointError(
            f"{location} has no valid checkpoint of step {step} of generation {generation}"
        )
    return store, found


def open_pointer(location: str, name: str, environment: Mapping[str, str] = os.environ) -> Pointer:
    """The pointer of this name at a location, beside the stores below it; as open_store()."""
    where = parse(location)
    if isinstance(where, Path):
        return FilePointer(where / name)
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.store import S3Pointer

    return S3Pointer(connect(where, environment), name)


def check_location(location: str) -> None:
    """Check the text of a location. Raises UsageError: no store can be there."""
    where = parse(location)
    if isinstance(where, Path):
        there = next(each for each in (where, *where.parents) if each.exists())
        if not there.is_dir():
            below = "" if there == where else f" is to lie below {there}, which"
            raise UsageError(f"checkpoint directory {where}{below} is a file")
