"""A pointer that is an object in S3."""

from __future__ import annotations

from rekindle.checkpoints.s3.client import Body, Bucket
from rekindle.checkpoints.s3.errors import S3Error, S3ErrorKind


class S3Pointer:
    """As `rekindle.checkpoints.open_store.Pointer` says.

    On a server that knows no conditional requests, of two who replace it at the same moment the
    second wins, and neither is refused.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self._key = bucket.location.root + name

    @property
    def location(self) -> str:
        """Its key, as a URL."""
        return self._bucket.location.url(self._key)

    def read(self) -> bytes | None:
        """The text; None: there is none."""
        try:
            return self._bucket.get(self._key)
        except S3Error as error:
            if error.kind is S3ErrorKind.MISSING:
                return None
            raise

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""
        # The tag is that of `old` or of an older text: then the server refuses.
        tags = [each.etag for each in self._bucket.objects(self._key) if each.key == self._key]
        if self.read() != old:
            return False
        try:
            return self._put(data, tags[0] if tags else None)
        except S3Error as error:
            # Also where ours was refused: the answer to the first try may have been lost.
            if error.kind in (S3ErrorKind.EXISTS, S3ErrorKind.MISSING):
                return self.read() == data
            raise

    def _put(self, data: bytes, tag: str | None) -> bool:
        body = Body([data]).slice(0, len(data))
        try:
            self._bucket.put(self._key, body, new=tag is None, over=tag or "")
        except S3Error as error:
            if error.kind is not S3ErrorKind.UNSUPPORTED:
                raise
            self._bucket.put(self._key, body)
        return True
