"""A file sent to a bucket: in parts side by side, going on where a killed writer stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rekindle.checkpoints.s3.body import Body, Slice
from rekindle.checkpoints.s3.client import Bucket, Upload
from rekindle.checkpoints.s3.errors import Kind, S3Error
from rekindle.checkpoints.s3.read import Source, is_intact
from rekindle.checkpoints.s3.threads import in_parallel
from rekindle.errors import CheckpointError

# Bytes. Two writers of the same bytes cut them at the same places, so that one goes on with the
# parts of the other.
PART = 16 << 20
_MOST_PARTS: Final = 10_000
_UPLOADS: Final = 3  # begun for one file, when the server drops them one after the other


def upload(source: Source, body: Body, told: Callable[[int], None]) -> None:
    """Make this object of these bytes, unless it is there and intact.

    told: of bytes that the server has.

    The key belongs to these bytes, so whoever else writes it writes the same.
    Raises CheckpointError; what has been sent by then is not sent again by the next attempt.
    """
    bucket, entry = source.bucket, source.entry
    if bucket.size(source.key) == entry.bytes and is_intact(source):
        told(entry.bytes)
        return
    if body.bytes <= PART:
        whole = body.slice(0, body.bytes)
        proven = bucket.put(source.key, whole) == whole.md5().hex()
        told(body.bytes)
    else:
        proven = _send(source, body, told)
    # A server may give ETags that are no MD5 (with some kinds of encryption); and one that does
    # not compare the MD5 it was told may have taken something else.
    if not proven and not is_intact(source):
        raise CheckpointError(
            f"{entry.name} is not what was sent, after it was written: check the storage service"
        )


def _send(source: Source, body: Body, told: Callable[[int], None]) -> bool:
    """Whether the server has proved with its ETags that it has these bytes."""
    left = _unfinished(source)
    for _ in range(_UPLOADS):
        begun, left = left or source.bucket.begin_upload(source.key), None
        try:
            return _send_parts(source.bucket, begun, body, told)
        except S3Error as error:
            if error.kind is not Kind.NO_UPLOAD:
                raise
        # Another writer of the same bytes has completed it, or the answer to us was lost.
        if source.bucket.size(source.key) == body.bytes:
            return False
    raise CheckpointError(
        f"cannot write {source.entry.name}: the server dropped {_UPLOADS} uploads of it; "
        "check the storage service, and its rules that abort uploads"
    )


def _unfinished(source: Source) -> Upload | None:
    """The upload of these bytes that a killed writer left, or that another one has under way."""
    try:
        uploads = source.bucket.uploads(source.key)
    except S3Error as error:
        if error.kind in (Kind.UNSUPPORTED, Kind.REFUSED, Kind.MISSING):
            return None  # a server, or credentials, for which it begins anew
        raise
    same = [found for found in uploads if found.key == source.key]
    return max(same, key=lambda found: (found.begun, found.id), default=None)


def _send_parts(bucket: Bucket, begun: Upload, body: Body, told: Callable[[int], None]) -> bool:
    there = bucket.sent(begun)

    def send(numbered: tuple[int, Slice]) -> tuple[str, bool]:
        number, part = numbered
        digest = part.md5().hex()
        known = there.get(number) == (len(part), digest)
        etag = digest if known else bucket.send(begun, number, part)
        told(len(part))
        return etag, etag == digest

    answers = in_parallel(send, enumerate(_parts(body), start=1))
    bucket.complete(begun, [etag for etag, _ in answers])
    return all(proven for _, proven in answers)


def _parts(body: Body) -> Iterator[Slice]:
    size = max(PART, -(-body.bytes // _MOST_PARTS))
    for begin in range(0, body.bytes, size):
        yield body.slice(begin, min(begin + size, body.bytes))
