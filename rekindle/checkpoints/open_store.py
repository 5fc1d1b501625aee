"""Open a store of checkpoints, or a pointer, by its location."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.location import parse
from rekindle.checkpoints.pointer import FilePointer, Pointer
from rekindle.checkpoints.store import Store
from rekindle.errors import UsageError


def open_store(location: str, environment: Mapping[str, str] = os.environ) -> Store:
    """The store at this location (`rekindle.checkpoints.location`); nothing is read of it yet.

    environment: has the credentials of the store.
    Raises UsageError: the text is no location, boto3 or the file of authorities is missing, or the
    environment has only a part of the credentials.
    """
    where = parse(location)
    if isinstance(where, Path):
        return DirectoryStore(where)
    # boto3 takes its time to import, and those with a directory need not have it.
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.store import S3Store

    return S3Store(where, connect(where, environment))


def open_pointer(location: str, name: str, environment: Mapping[str, str] = os.environ) -> Pointer:
    """The pointer of this name at a location, beside the stores below it; as open_store()."""
    where = parse(location)
    if isinstance(where, Path):
        return FilePointer(where / name)
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.pointer import S3Pointer

    return S3Pointer(connect(where, environment), name)


def check_location(location: str) -> None:
    """Check the text of a location. Raises UsageError: no store can be there."""
    where = parse(location)
    if isinstance(where, Path):
        there = next(each for each in (where, *where.parents) if each.exists())
        if not there.is_dir():
            below = "" if there == where else f" is to lie below {there}, which"
            raise UsageError(f"checkpoint directory {where}{below} is a file")
