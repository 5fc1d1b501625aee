"""Classification of failed S3 requests: whether to repeat the request, and what the user can do.

A message never repeats text of a server or of botocore, because it may contain a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from rekindle import names
from rekindle.errors import CheckpointError

_RIGHTS = "give these credentials the right to list, read, write and delete below that prefix"
_CREDENTIALS = (
    f"give valid credentials in {names.ENV_STORE_ACCESS_KEY_ID}, "
    f"{names.ENV_STORE_SECRET_ACCESS_KEY} and, for temporary ones, "
    f"{names.ENV_STORE_SESSION_TOKEN}, or in another place where boto3 finds them"
)
_FRESH = "give new credentials, or credentials that boto3 can renew"
_SERVER = "check the endpoint in the location, the network and the storage service"
_SETTINGS = "check the endpoint, region and addressing in the location"
_BUCKET = "create the bucket, or correct its name in the location"
_SPACE = "free some space, or keep fewer checkpoints"
_TLS = (
    "give the certificate authority of the server (verify=/path/ca.pem in the location), or "
    "check the endpoint"
)

_REMEDIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _FRESH),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"), _CREDENTIALS),
    **dict.fromkeys(("AccessDenied", "Forbidden", "AllAccessDisabled"), _RIGHTS),
    "RequestTimeTooSkewed": "set the clock of this machine",
    **dict.fromkeys(("NoSuchBucket", "InvalidBucketName"), _BUCKET),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed"), _SETTINGS),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"), _SPACE),
    "InvalidObjectState": "restore the object from the archive",
}

_STATUS_REMEDIES: Final[Mapping[int, str]] = {401: _CREDENTIALS, 403: _RIGHTS, 507: _SPACE}
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9.]{0,63}")


class S3ErrorKind(Enum):
    """The cause of a failed request, or how to handle it."""

    PASSING = "try again"
    MISSING = "there is no such object"
    NO_UPLOAD = "there is no such upload"
    EXISTS = "the object exists already, or is being made"
    UNSUPPORTED = "the server does not know this request"
    RANGE = "the object has no such bytes"
    ARCHIVED = "the object has to be restored before it can be read"
    REFUSED = "it will be refused again"


class S3Error(CheckpointError):
    """A request that failed."""

    def __init__(self, text: str, kind: S3ErrorKind) -> None:
        super().__init__(text)
        self.kind = kind


class Judgement(msgspec.Struct, frozen=True):
    """The reason of a failure, as text without secrets, and the remedy."""

    kind: S3ErrorKind
    reason: str
    remedy: str


_KINDS: Final[Mapping[str, S3ErrorKind]] = {
    "NoSuchKey": S3ErrorKind.MISSING,
    "NoSuchUpload": S3ErrorKind.NO_UPLOAD,
    "PreconditionFailed": S3ErrorKind.EXISTS,
    "ConditionalRequestConflict": S3ErrorKind.EXISTS,
    "NotImplemented": S3ErrorKind.UNSUPPORTED,
    "NotSupported": S3ErrorKind.UNSUPPORTED,
    "InvalidRange": S3ErrorKind.RANGE,
    "InvalidObjectState": S3ErrorKind.ARCHIVED,
    "SlowDown": S3ErrorKind.PASSING,
    "Throttling": S3ErrorKind.PASSING,
    "ThrottlingException": S3ErrorKind.PASSING,
    "RequestLimitExceeded": S3ErrorKind.PASSING,
    "RequestTimeout": S3ErrorKind.PASSING,
    "OperationAborted": S3ErrorKind.PASSING,
    # The body was damaged or truncated on the way to the server.
    "BadDigest": S3ErrorKind.PASSING,
    "IncompleteBody": S3ErrorKind.PASSING,
    "XAmzContentSHA256Mismatch": S3ErrorKind.PASSING,
}
_STATUS_KINDS: Final[Mapping[int, S3ErrorKind]] = {
    404: S3ErrorKind.MISSING,
    405: S3ErrorKind.UNSUPPORTED,
    409: S3ErrorKind.EXISTS,
    412: S3ErrorKind.EXISTS,
    416: S3ErrorKind.RANGE,
    429: S3ErrorKind.PASSING,
    501: S3ErrorKind.UNSUPPORTED,
}

_BROKEN: Final = Judgement(S3ErrorKind.PASSING, "the connection broke", _SERVER)
# Names of botocore's exceptions, a part of the text in lower case, and the judgement. The first row
# that fits counts.
_FAILURES: Final[Sequence[tuple[tuple[str, ...], str, Judgement]]] = (
    (
        ("SSLError",),
        "certificate",
        Judgement(
            S3ErrorKind.REFUSED, "the client does not accept the server's TLS certificate", _TLS
        ),
    ),
    (
        ("SSLError",),
        "wrong_version_number",
        Judgement(S3ErrorKind.REFUSED, "the server does not speak TLS", _TLS),
    ),
    (
        ("NoCredentialsError", "PartialCredentialsError"),
        "",
        Judgement(S3ErrorKind.REFUSED, "there are no credentials", _CREDENTIALS),
    ),
    (
        ("CredentialRetrievalError", "TokenRetrievalError"),
        "",
        Judgement(S3ErrorKind.PASSING, "the client cannot fetch the credentials", _CREDENTIALS),
    ),
    (
        ("ProxyConnectionError",),
        "",
        Judgement(
            S3ErrorKind.PASSING, "the proxy that the environment names does not answer", _SERVER
        ),
    ),
    (
        ("ReadTimeoutError", "ConnectTimeoutError"),
        "",
        Judgement(S3ErrorKind.PASSING, "the server does not answer in time", _SERVER),
    ),
    (
        ("EndpointConnectionError",),
        "",
        Judgement(S3ErrorKind.PASSING, "the client cannot reach the server", _SERVER),
    ),
    (("HTTPClientError", "ConnectionError", "IncompleteReadError"), "", _BROKEN),
)


def judge(error: Exception) -> Judgement | None:
    """Classify an exception. Return None if requests do not raise such exceptions."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        return judge_answer(error.response)
    if isinstance(error, BotoCoreError | HTTPError | OSError):
        return judge_failure(error)
    if isinstance(error, ResponseParserError | KeyError):
        return Judgement(
            S3ErrorKind.PASSING, "the answer does not have the format of an S3 server", _SERVER
        )
    return None


def judge_answer(answer: Mapping[str, Any]) -> Judgement:
    """Classify the error in a server's answer. answer: `response` of botocore's ClientError."""
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(answer.get("Error", {}).get("Code", ""))
    if not _CODE.fullmatch(code):  # the answer to a HEAD request has the status as its code
        code = ""
    kind = _KINDS.get(code) or (
        S3ErrorKind.REFUSED if code in _REMEDIES else _STATUS_KINDS.get(status)
    )
    if kind is None:
        kind = S3ErrorKind.PASSING if status >= 500 else S3ErrorKind.REFUSED
    remedy = _REMEDIES.get(code) or _STATUS_REMEDIES.get(status)
    remedy = remedy or (_SERVER if status >= 500 or kind is S3ErrorKind.PASSING else _SETTINGS)
    return Judgement(kind, f"the server answered {status} {code}".rstrip(), remedy)


def judge_failure(error: Exception) -> Judgement:
    """Classify an exception of botocore or urllib3 other than ClientError by its class."""
    from botocore import exceptions

    for kinds, text, judgement in _FAILURES:
        named = tuple(getattr(exceptions, kind) for kind in kinds)
        if isinstance(error, named) and text in str(error).lower():
            return judgement
    if not isinstance(error, exceptions.BotoCoreError):
        return _BROKEN
    return Judgement(
        S3ErrorKind.REFUSED,
        f"the client failed with {type(error).__name__} before it sent the request",
        _SETTINGS,
    )
