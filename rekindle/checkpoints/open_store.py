"""Open a store of checkpoints, or a pointer, by its location."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

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
from rekindle.states import StateId


class Pointer(Protocol):
    """A short text at a location.

    Every method raises CheckpointError: the text cannot be read or written.
    """

    @property
    def location(self) -> str:
        """Return the location in the form that users and tools see."""

    def read(self) -> bytes | None:
        """Return the text; None: it does not exist."""

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text if the present text is `old`. Otherwise return False without a change."""

    def remove(self, old: bytes) -> bool:
        """Remove the text if it is `old`. Otherwise return False without a change."""


class FilePointer:
    """A pointer in a file. A reader sees the old or the new text, never a part of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        """Return its absolute path."""
        return str(self._path)

    def read(self) -> bytes | None:
        """Return the text; None: it does not exist."""
        with explained("read", self._path):
            try:
                return self._path.read_bytes()
            except FileNotFoundError:
                return None

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text if the present text is `old`. Otherwise return False without a change."""
        with explained("write", self._path):
            make_directories(self._path.parent)
            with locked(self._path.parent):
                if self.read() != old:
                    return False
                new = self._path.with_name(f".{self._path.name}.new")
                new.unlink(missing_ok=True)  # a writer that was killed left it
                with opened_directory(new.parent) as directory:
                    write_file(directory, new.name, [data])
                new.replace(self._path)
                sync_directory(new.parent)
                return True

    def remove(self, old: bytes) -> bool:
        """Remove the text if it is `old`. Otherwise return False without a change."""
        with explained("remove", self._path), locked(self._path.parent):
            if self.read() != old:
                return False
            self._path.unlink()
            sync_directory(self._path.parent)
            return True


def open_store(location: str, environment: Mapping[str, str] = os.environ) -> CheckpointStore:
    """Return the store at a location: a folder or an s3:// URL. The function reads nothing yet.

    location: an absolute path or s3://bucket/prefix. environment: variables with the credentials of
    the store.
    Raises UsageError: the location is not valid (for example a relative path), boto3 or the file of
    authorities is missing, or the environment has only a part of the credentials.
    """
    where = parse(location)
    if isinstance(where, Path):
        return DirectoryStore(where)
    # boto3 takes long to import, and a user with a directory may not have it.
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.store import S3Store

    return S3Store(where, connect(where, environment))


def find_checkpoint(location: str, key: StateId) -> tuple[CheckpointStore, Checkpoint]:
    """Open a store and find its checkpoint of this step and generation.

    Raises CheckpointError: the store does not have it, or cannot be read.
    """
    store, (step, generation) = open_store(location), key
    found = store.find(step, generation)
    if found is None:
        raise CheckpointError(
            f"{location} has no valid checkpoint of step {step} of generation {generation}"
        )
    return store, found


def open_pointer(location: str, name: str, environment: Mapping[str, str] = os.environ) -> Pointer:
    """Return the pointer of this name at a location, next to the stores below it.

    The parameters and errors are the same as for open_store().
    """
    where = parse(location)
    if isinstance(where, Path):
        return FilePointer(where / name)
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.store import S3Pointer

    return S3Pointer(connect(where, environment), name)


def check_location(location: str) -> None:
    """Check the text of a location. Raises UsageError: a store cannot exist there."""
    where = parse(location)
    if isinstance(where, Path):
        there = next(each for each in (where, *where.parents) if each.exists())
        if not there.is_dir():
            below = "" if there == where else f" is below {there}, which"
            raise UsageError(
                f"checkpoint directory {where}{below} is a file; name another directory"
            )
