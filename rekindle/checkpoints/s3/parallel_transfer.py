"""Parallel transfers to and from S3. Each block and part is verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from rekindle.checkpoints.block_checksums import BLOCK, Span, read_span, spans
from rekindle.checkpoints.files import private_memory
from rekindle.checkpoints.manifest import FileEntry
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.s3.client import Body, Bucket, Slice, Upload
from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind
from rekindle.errors import CheckpointError, CorruptError, MissingError

A = TypeVar("A")
B = TypeVar("B")

# Bytes. Two writers of the same bytes cut them at the same positions, so that one writer can reuse
# the parts of the other.
PART = 16 << 20
_MOST_PARTS: Final = 10_000
_UPLOADS: Final = 3  # attempts for one file, if the server aborts each upload


def in_parallel(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Return the result of `work` for each item, started in order. Stop at the first failure."""
    with ThreadPoolExecutor(s3_client.THREADS, thread_name_prefix="rekindle-s3") as pool:
        futures = deque(pool.submit(work, item) for item in items)
        found = []
        try:
            # A future has no name here. A name would keep a failed future, its frames and thereby
            # the bytes of the request in memory.
            while futures:
                found.append(futures.popleft().result())
        except BaseException:
            futures.clear()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return found


class Source(msgspec.Struct, frozen=True):
    """A file of a checkpoint, and the object that holds it."""

    bucket: Bucket
    key: str
    entry: FileEntry


def read_into(source: Source, begin: int, view: memoryview) -> None:
    """Fill the view with the file's bytes, starting at `begin`.

    Raises CorruptError if they differ from the manifest, S3Error if unreadable.
    """
    wanted = spans(source.entry, begin, begin + len(view))
    in_parallel(lambda span: _read(source, span, begin, view), wanted)


def read_range(source: Source, begin: int, end: int) -> memoryview:
    """Return the object's unverified bytes from `begin` to `end`, or fewer if it ends before.

    Raises MissingError, S3Error if unreadable.
    """
    size = source.bucket.size(source.key)
    if size is None:
        raise MissingError(f"{source.entry.name} is missing")
    view = private_memory(max(0, min(end, size) - begin))

    def fetch(first: int) -> None:
        source.bucket.fetch(source.key, begin + first, view[first : first + BLOCK])

    in_parallel(fetch, range(0, len(view), BLOCK))
    return view


def verify(sources: Iterable[Source]) -> None:
    """Read all bytes of these files, with only a few in memory at a time.

    Raises CorruptError if they differ from the manifest, S3Error if unreadable.
    """
    blocks = [
        (source, span) for source in sources for span in spans(source.entry, 0, source.entry.bytes)
    ]
    in_parallel(_verify, blocks)


def is_intact(source: Source) -> bool:
    """Return whether the object agrees with the manifest. Raises S3Error: it cannot be read."""
    try:
        verify([source])
    except CorruptError:
        return False
    return True


def _verify(block: tuple[Source, Span]) -> None:
    source, span = block
    _read(source, span, span.begin, memoryview(bytearray(span.end - span.begin)))


def _read(source: Source, span: Span, begin: int, view: memoryview) -> None:
    def fetch(offset: int, target: memoryview) -> None:
        source.bucket.fetch(source.key, offset, target)

    try:
        try:
            read_span(source.entry, span, begin, view, fetch)
        except CorruptError:
            # Without TLS, the answer may have been damaged on the way.
            read_span(source.entry, span, begin, view, fetch)
    except S3Error as error:
        if error.kind is S3ErrorKind.MISSING:
            raise CorruptError(f"{source.entry.name} is missing") from error
        if error.kind is S3ErrorKind.RANGE:
            raise CorruptError(f"{source.entry.name} is too short") from error
        raise


def upload(source: Source, body: Body, on_bytes: Callable[[int], None]) -> None:
    """Write this object with these bytes, unless it exists and is intact.

    on_bytes: called with the number of bytes that the server has. The key contains the checksum, so
    another writer of this key writes the same bytes.
    Raises CheckpointError. The next attempt does not send parts again that the server has.
    """
    bucket, entry = source.bucket, source.entry
    if bucket.size(source.key) == entry.bytes and is_intact(source):
        on_bytes(entry.bytes)
        return
    if body.bytes <= PART:
        whole = body.slice(0, body.bytes)
        proven = bucket.put(source.key, whole) == whole.md5().hex()
        on_bytes(body.bytes)
    else:
        proven = _send(source, body, on_bytes)
    # Some servers return ETags that are not an MD5 (with some kinds of encryption). A server that
    # does not check the MD5 may have stored other bytes.
    if not proven and not is_intact(source):
        raise CheckpointError(
            f"the stored bytes of {entry.name} differ from the bytes that Rekindle sent; check "
            "the storage service"
        )


def _send(source: Source, body: Body, on_bytes: Callable[[int], None]) -> bool:
    """Send the bytes in parts. Return whether the server's ETags prove that it has these bytes."""
    left = _unfinished(source)
    for _ in range(_UPLOADS):
        begun, left = left or source.bucket.begin_upload(source.key), None
        try:
            return _send_parts(source.bucket, begun, body, on_bytes)
        except S3Error as error:
            if error.kind is not S3ErrorKind.NO_UPLOAD:
                raise
        # Another writer of the same bytes has completed the upload, or the server's answer was
        # lost.
        if source.bucket.size(source.key) == body.bytes:
            return False
    raise CheckpointError(
        f"cannot write {source.entry.name}: the server dropped {_UPLOADS} uploads of it; "
        "check the storage service, and its rules that abort uploads"
    )


def _unfinished(source: Source) -> Upload | None:
    """Return the newest unfinished upload of these bytes, or None.

    A killed writer has left it, or another writer is using it.
    """
    try:
        uploads = source.bucket.uploads(source.key)
    except S3Error as error:
        if error.kind in (S3ErrorKind.UNSUPPORTED, S3ErrorKind.REFUSED, S3ErrorKind.MISSING):
            return None  # this server or these credentials do not allow it, so a new upload begins
        raise
    same = [found for found in uploads if found.key == source.key]
    return max(same, key=lambda found: (found.begun, found.id), default=None)


def _send_parts(bucket: Bucket, begun: Upload, body: Body, on_bytes: Callable[[int], None]) -> bool:
    there = bucket.sent(begun)

    def send(numbered: tuple[int, Slice]) -> tuple[str, bool]:
        number, part = numbered
        digest = part.md5().hex()
        known = there.get(number) == (len(part), digest)
        etag = digest if known else bucket.send(begun, number, part)
        on_bytes(len(part))
        return etag, etag == digest

    answers = in_parallel(send, enumerate(_parts(body), start=1))
    bucket.complete(begun, [etag for etag, _ in answers])
    return all(proven for _, proven in answers)


def _parts(body: Body) -> Iterator[Slice]:
    size = max(PART, -(-body.bytes // _MOST_PARTS))
    for begin in range(0, body.bytes, size):
        yield body.slice(begin, min(begin + size, body.bytes))
