"""Requests to a bucket, which are repeated if that helps, and the bodies that they send."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec

from rekindle.checkpoints.format import Bytes
from rekindle.checkpoints.location import S3Location
from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind, judge

# Least number of bytes that read() returns, if the chunk has them. http.client requests 16 KiB at a
# time, and each request wakes the interpreter. A slow line cannot send larger pieces within the
# timeout.
_BODY_PIECE = 256 << 10
T = TypeVar("T")
THREADS: Final = 4  # requests in parallel: enough for a fast line, and a small load
# Seconds for which a failed request is repeated. A server is sometimes unavailable for a minute.
PATIENCE_S = 120.0
_BODY_S: Final = 120.0  # for a complete answer: an answer that arrives too slowly counts as failed
_PIECE: Final = 1 << 20  # bytes of an answer in urllib3's memory
_PAUSES_S: Final = (0.2, 8.0)  # pause before the first repetition, and the longest pause


class Body:
    """A sequence of chunks. A request can send any range of their bytes."""

    def __init__(self, chunks: Sequence[Bytes]) -> None:
        views = [memoryview(chunk).cast("B") for chunk in chunks if memoryview(chunk).nbytes]
        self._views = views
        self._ends = list(accumulate(map(len, views)))
        self.bytes = self._ends[-1] if views else 0

    def slice(self, begin: int, end: int) -> Slice:
        """Return the bytes from begin to end."""
        cut = []
        for index in range(bisect_right(self._ends, begin), len(self._views)):
            at = self._ends[index] - len(self._views[index])
            if at >= end:
                break
            cut.append(self._views[index][max(begin - at, 0) : end - at])
        return Slice(cut)


class Slice:
    """Some bytes, as the file from which botocore reads a request's body."""

    def __init__(self, chunks: Sequence[Bytes]) -> None:
        self._views = views = [memoryview(chunk) for chunk in chunks]
        self._bytes = sum(map(len, views))
        self._at = 0
        self._md5: bytes | None = None

    def __len__(self) -> int:
        return self._bytes

    def __bool__(self) -> bool:
        return True  # botocore must send an empty body also

    def read(self, size: int = -1) -> bytes | memoryview:
        """Return the next bytes of one chunk, or all remaining bytes if size is negative.

        The result may have more than `size` bytes, up to 256 KiB.
        """
        if size < 0:
            rest = b"".join(self._from(self._at))
            self._at = self._bytes
            return rest
        piece = next(self._from(self._at), memoryview(b""))[: max(size, _BODY_PIECE)]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._bytes}.get(whence, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def md5(self) -> bytes:
        """Return the MD5 of all bytes. Every server compares the body with this checksum."""
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


class Stored(msgspec.Struct, frozen=True):
    """An object in a listing. modified: in seconds since the epoch."""

    key: str
    bytes: int
    etag: str
    modified: float


class Upload(msgspec.Struct, frozen=True):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    id: str
    begun: float


class Bucket:
    """The operations on objects. Every method raises S3Error. Many threads may use a bucket.

    patience_s: how long a request is repeated after a failure that may be temporary.
    """

    def __init__(self, location: S3Location, client: Any, patience_s: float | None = None) -> None:
        self.location = location
        self._client = client
        self.patience_s = PATIENCE_S if patience_s is None else patience_s

    def at_once(self) -> Bucket:
        """Return the same bucket without repetitions, for requests that can also succeed later."""
        return Bucket(self.location, self._client, patience_s=0)

    def get(self, key: str) -> bytes:
        """Return the complete object."""
        return self._try("read", key, lambda: bytes(self._do("get_object", Key=key)["Body"].read()))

    def fetch(self, key: str, begin: int, view: memoryview) -> None:
        """Fill the view with the object's bytes, starting at `begin`.

        Raises S3Error with S3ErrorKind.RANGE: the object has fewer bytes.
        """
        if view and not self._try("read", key, lambda: self._fetch(key, begin, view)):
            raise S3Error(f"{self.location.url(key)} is too short", S3ErrorKind.RANGE)

    def put(self, key: str, body: Slice, *, new: bool = False, over: str = "") -> str:
        """Write the object, and return its ETag.

        new: write only if the object does not exist. over: write only if the object has this ETag.
        Raises S3Error with S3ErrorKind.EXISTS if the condition is false, and the server supports
        conditions.
        """
        condition = {"IfNoneMatch": "*"} if new else {"IfMatch": over} if over else {}
        return self._send("put_object", body, Key=key, **condition)

    def delete(self, key: str) -> None:
        """Remove the object, if it exists."""
        self._try("remove", key, lambda: self._do("delete_object", Key=key))

    def objects(self, prefix: str) -> list[Stored]:
        """Return all objects whose key begins with this prefix."""
        # Some servers do not support version 2 of this request.
        pages = self._pages("list", prefix, "list_objects")
        return [
            Stored(
                found["Key"], found["Size"], found["ETag"].strip('"'), _when(found, "LastModified")
            )
            for page in pages
            for found in page.get("Contents", ())
        ]

    def size(self, key: str) -> int | None:
        """Return the bytes of the object, or None if it does not exist.

        The method uses a listing, because an answer to a HEAD request does not contain the cause of
        an error.
        """
        answer = self._try("list", key, lambda: self._do("list_objects", Prefix=key, MaxKeys=1))
        sizes = [found["Size"] for found in answer.get("Contents", ()) if found["Key"] == key]
        return sizes[0] if sizes else None

    def uploads(self, prefix: str) -> list[Upload]:
        """Return the unfinished multipart uploads of keys that begin with this prefix."""
        pages = self._pages("list the uploads of", prefix, "list_multipart_uploads")
        try:
            return [
                Upload(found["Key"], found["UploadId"], _when(found, "Initiated"))
                for page in pages
                for found in page.get("Uploads", ())
            ]
        except S3Error as error:
            if error.kind is S3ErrorKind.NO_UPLOAD:  # the answer of some servers without uploads
                return []
            raise

    def begin_upload(self, key: str) -> Upload:
        """Begin a multipart upload."""
        upload = self._try(
            "write", key, lambda: str(self._do("create_multipart_upload", Key=key)["UploadId"])
        )
        return Upload(key, upload, time.time())

    def sent(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """Return the parts of this upload on the server: bytes and ETag by number."""
        pages = self._pages("write", upload.key, "list_parts", Key=upload.key, UploadId=upload.id)
        return {
            part["PartNumber"]: (part["Size"], part["ETag"].strip('"'))
            for page in pages
            for part in page.get("Parts", ())
        }

    def send(self, upload: Upload, number: int, body: Slice) -> str:
        """Send this part, and return its ETag."""
        return self._send(
            "upload_part", body, Key=upload.key, UploadId=upload.id, PartNumber=number
        )

    def complete(self, upload: Upload, etags: list[str]) -> None:
        """Complete the upload with these parts. The first part has number 1."""
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, start=1)]
        self._try(
            "write",
            upload.key,
            lambda: self._do(
                "complete_multipart_upload",
                Key=upload.key,
                UploadId=upload.id,
                MultipartUpload={"Parts": parts},
            ),
        )

    def abort(self, upload: Upload) -> None:
        """Abort the upload, and remove its parts."""
        request = {"Key": upload.key, "UploadId": upload.id}
        self._try("abort", upload.key, lambda: self._do("abort_multipart_upload", **request))

    def _do(self, operation: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._client, operation)(
            Bucket=self.location.bucket, **arguments
        )
        return answer

    def _send(self, operation: str, body: Slice, **arguments: Any) -> str:
        digest = base64.b64encode(body.md5()).decode()

        def once() -> str:
            body.seek(0)
            answer = self._do(operation, Body=body, ContentMD5=digest, **arguments)
            return str(answer.get("ETag", "")).strip('"')

        return self._try("write", arguments["Key"], once)

    def _fetch(self, key: str, begin: int, view: memoryview) -> bool:
        """Fill the view. Return False if the object does not have all of these bytes."""
        until = f"bytes={begin}-{begin + len(view) - 1}"
        answer = self._do("get_object", Key=key, Range=until)
        deadline = time.monotonic() + _BODY_S
        with contextlib.closing(answer["Body"]) as body:
            if answer.get("ContentLength", len(view)) != len(view):
                return False
            while view:
                count = body.readinto(view[:_PIECE])
                if not count or time.monotonic() > deadline:
                    raise TimeoutError
                view = view[count:]
        return True

    def _pages(self, action: str, prefix: str, operation: str, **of: Any) -> Iterator[Any]:
        """Yield the answers of a listing, in order."""
        arguments = of or {"Prefix": prefix}
        while True:
            page = self._try(action, prefix, partial(self._do, operation, **arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            after = _after(operation, page)
            if None in after.values() or after.items() <= arguments.items():
                url = self.location.url(prefix)
                raise S3Error(
                    f"cannot {action} {url}: the server did not return the next page of the list",
                    S3ErrorKind.REFUSED,
                )
            arguments |= after

    def _try(self, action: str, key: str, request: Callable[[], T]) -> T:
        """Repeat the request until it succeeds, fails permanently, or fails for too long."""
        began, pause = time.monotonic(), _PAUSES_S[0]
        while True:
            try:
                return request()
            except Exception as error:
                judgement = judge(error)
                if judgement is None:
                    raise
                judged = judgement
            waited = time.monotonic() - began
            if judged.kind is not S3ErrorKind.PASSING or waited + pause > self.patience_s:
                break
            time.sleep(pause * random.uniform(0.5, 1.0))  # random, to spread the threads' requests
            pause = min(2 * pause, _PAUSES_S[1])
        for_long = (
            f", for {waited:.0f} s" if judged.kind is S3ErrorKind.PASSING and waited > 1 else ""
        )
        # The library's error is not the cause: it repeats the server's message, which may have a
        # secret.
        raise S3Error(
            f"cannot {action} {self.location.url(key)}: {judged.reason}{for_long}; {judged.remedy}",
            judged.kind,
        ) from None


def _when(found: Mapping[str, Any], field: str) -> float:
    moment = found.get(field)
    return moment.timestamp() if moment else 0.0


def _after(operation: str, page: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of the next page of the listing."""
    if operation == "list_objects":
        return {"Marker": page["Contents"][-1]["Key"] if page.get("Contents") else None}
    if operation == "list_parts":
        return {"PartNumberMarker": page.get("NextPartNumberMarker")}
    return {name: page.get(f"Next{name}") for name in ("KeyMarker", "UploadIdMarker")}
