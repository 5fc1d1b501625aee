"""Define the errors for refusals of the API server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.errors import JobError

_ALL_RIGHTS = "rekindle kubernetes check lists all missing rights"


class ApiError(JobError):
    """A request that the API server refused, or did not answer in time.

    status: HTTP's; 0: there was no answer. reason: the API's word (AlreadyExists, Expired).
    passing: the same request may succeed later. after_s: the pause that the server requests, or 0.
    """

    def __init__(
        self, message: str, *, status: int = 0, reason: str = "", passing: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.passing = passing
        self.after_s = 0.0


class MissingObjectError(ApiError):
    """The object or the kind does not exist."""


class ConflictError(ApiError):
    """The object exists already, or has another uid or a newer version than the request names."""


class ForbiddenError(ApiError):
    """The user of this process does not have the right."""


class ExpiredError(ApiError):
    """The requested version is older, or newer, than the versions that the server knows."""


class DamagedError(JobError):
    """An object's content, written by another program, is damaged; Rekindle does not use it."""


_KINDS: Mapping[int, type[ApiError]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: MissingObjectError,
    409: ConflictError,
    410: ExpiredError,
}


def refusal(asked: str, status: int, status_object: Mapping[str, Any]) -> ApiError:
    """Make an error of a Status object. asked: a short name of the request."""
    reason, message = str(status_object.get("reason", "")), str(status_object.get("message", ""))
    kind = _KINDS.get(status, ApiError)
    if status == 504 and "Too large resource version" in message:
        kind = ExpiredError  # for a server that lags behind, or was restored from a backup
    rights = f"; {_ALL_RIGHTS}" if status == 403 and 'User "' in message else ""
    text = f"{asked}: {message or reason or f'HTTP {status}'}{rights}"
    return kind(text, status=status, reason=reason)


def status_object_in(data: bytes) -> Mapping[str, Any]:
    """Read a Status object; other text becomes its message."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": data.decode(errors="replace")[:200]}
