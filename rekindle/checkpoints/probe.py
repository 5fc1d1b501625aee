"""Write, read and delete a small file or object where a job will write its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rekindle.checkpoints.files import explained, opened_directory, write_file
from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import check_location
from rekindle.errors import CheckpointError, UsageError

_PREFIX: Final = ".rekindle-probe-"
_BYTES: Final = 1 << 20  # more than a file system has in reserve when it is full
# A file system may refuse for these reasons for a moment. All others are mistakes.
_PASSING: Final = frozenset(
    (
        *(errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EREMOTEIO, errno.ENOLCK),
    )
)


def probe(location: str, environment: Mapping[str, str] = os.environ) -> str:
    """Write, read and delete a probe at a location; return why the deletion failed, or "".

    The function makes no folder: the probe of a folder that does not exist is in the nearest one
    above it. environment: variables with the credentials of the store.
    Raises UsageError: a store at this location can never be written or read. Raises
    CheckpointError: a repetition may succeed.
    """
    check_location(location)
    where = parse(location)
    data = secrets.token_bytes(_BYTES)
    if isinstance(where, Path):
        return _probe_folder(where, data)
    return _probe_bucket(where, environment, data)


def _probe_folder(folder: Path, data: bytes) -> str:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    file = there / f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        with explained("write", there), opened_directory(there) as directory:
            write_file(directory, file.name, [data])
        with explained("read", there):
            found = file.read_bytes()
    except CheckpointError as error:
        file.unlink(missing_ok=True)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            raise
        raise UsageError(str(error)) from error
    _compare(found, data, str(there))
    try:
        file.unlink()
    except OSError as error:
        return f"cannot remove {file}: {error.strerror}"
    return ""


def _probe_bucket(where: S3Location, environment: Mapping[str, str], data: bytes) -> str:
    # boto3 takes long to import, and a user with a directory may not have it.
    from rekindle.checkpoints.s3.client import Slice
    from rekindle.checkpoints.s3.connect import connect
    from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind

    bucket = connect(where, environment).at_once()
    key = f"{where.root}{_PREFIX}{secrets.token_hex(8)}"
    try:
        bucket.put(key, Slice([data]))
        found = bucket.get(key)
        bucket.objects(key)
    except S3Error as error:
        with contextlib.suppress(S3Error):  # the first error has the cause
            bucket.delete(key)
        if error.kind is S3ErrorKind.PASSING:
            raise
        raise UsageError(str(error)) from error
    _compare(found, data, where.url())
    try:
        bucket.delete(key)
    except S3Error as error:
        if error.kind is S3ErrorKind.PASSING:
            raise
        return str(error)
    return ""


def _compare(found: bytes, data: bytes, where: str) -> None:
    if found != data:
        raise UsageError(f"{where} returns other bytes than were written; check the storage")
