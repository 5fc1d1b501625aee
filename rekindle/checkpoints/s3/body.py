"""The bytes of an object to send: slices of the given chunks, never a copy of them."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rekindle.checkpoints.format import Bytes

# Bytes handed out at once, at least. http.client asks for 16 KiB at a time, for each of which the
# interpreter would be woken; more than this would not get through a slow line within a timeout.
_PIECE = 256 << 10


class Body:
    """Chunks, one after the other, of which any range can be sent."""

    def __init__(self, chunks: Sequence[Bytes]) -> None:
        views = [memoryview(chunk).cast("B") for chunk in chunks if memoryview(chunk).nbytes]
        self._views = views
        self._ends = list(accumulate(map(len, views)))
        self.bytes = self._ends[-1] if views else 0

    def slice(self, begin: int, end: int) -> Slice:
        """The bytes from begin to end."""
        cut = []
        for index in range(bisect_right(self._ends, begin), len(self._views)):
            at = self._ends[index] - len(self._views[index])
            if at >= end:
                break
            cut.append(self._views[index][max(begin - at, 0) : end - at])
        return Slice(cut)


class Slice:
    """Some bytes, as the file that botocore reads a request's body from."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._bytes = sum(map(len, views))
        self._at = 0
        self._md5: bytes | None = None

    def __len__(self) -> int:
        return self._bytes

    def __bool__(self) -> bool:
        return True  # an empty body is one, too

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next bytes, of one chunk; all that are left if size is negative."""
        if size < 0:
            rest = b"".join(self._from(self._at))
            self._at = self._bytes
            return rest
        piece = next(self._from(self._at), memoryview(b""))[: max(size, _PIECE)]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._bytes}.get(whence, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def md5(self) -> bytes:
        """Of all its bytes: the one checksum that every server compares them with."""
        if self._md5 is None:
            digest = hashlib.md5(usedforsecurity=False)
            for view in self._views:
                digest.update(view)
            self._md5 = digest.digest()
        return self._md5

    def _from(self, offset: int) -> Iterator[memoryview]:
        for view in self._views:
            if offset < len(view):
                yield view[max(offset, 0) :]
            offset -= len(view)
