"""Objects read in blocks, side by side, each verified where it arrives."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.checkpoints.block_checksums import BLOCK, Span, read_span, spans
from rekindle.checkpoints.files import private_memory
from rekindle.checkpoints.manifest import FileEntry
from rekindle.checkpoints.s3.client import Bucket
from rekindle.checkpoints.s3.errors import Kind, S3Error
from rekindle.checkpoints.s3.threads import in_parallel
from rekindle.errors import CorruptError, MissingError


class Source(msgspec.Struct, frozen=True):
    """A file of a checkpoint, and the object that holds it."""

    bucket: Bucket
    key: str
    entry: FileEntry


def read_into(source: Source, begin: int, view: memoryview) -> None:
    """Fill the view with the file's bytes from `begin` on.

    Raises CorruptError unless they are what the manifest says, S3Error if unreadable.
    """
    wanted = spans(source.entry, begin, begin + len(view))
    in_parallel(lambda span: _read(source, span, begin, view), wanted)


def read_range(source: Source, begin: int, end: int) -> memoryview:
    """The object's bytes from `begin` to `end`, fewer if it ends before; nothing is verified.

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
    """Read all bytes of these files, of which few are in memory at a time.

    Raises CorruptError unless they are what the manifest says, S3Error if unreadable.
    """
    blocks = [
        (source, span) for source in sources for span in spans(source.entry, 0, source.entry.bytes)
    ]
    in_parallel(_verify, blocks)


def is_intact(source: Source) -> bool:
    """Whether the object is what the manifest says; S3Error if that cannot be told."""
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
            # Without TLS they may have been damaged on the way.
            read_span(source.entry, span, begin, view, fetch)
    except S3Error as error:
        if error.kind is Kind.MISSING:
            raise CorruptError(f"{source.entry.name} is missing") from error
        if error.kind is Kind.RANGE:
            raise CorruptError(f"{source.entry.name} is too short") from error
        raise
