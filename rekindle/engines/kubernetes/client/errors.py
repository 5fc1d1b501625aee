"""What the API server answers where it does not do what was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.errors import JobError


class ApiError(JobError):
    """A request that the API server refused, or did not answer in time.

    status: HTTP's; 0: there was no answer. reason: the API's own word (AlreadyExists, Expired).
    passing: the same request may succeed later. after_s: the pause that the server asks for; or 0.
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
    """There is no such object, or no such kind."""


class ConflictError(ApiError):
    """It exists already, or is another one, or newer, than was named."""


class ForbiddenError(ApiError):
    """Whoever we are may not do this."""


class ExpiredError(ApiError):
    """What was asked for is older, or newer, than what the server remembers."""


class DamagedError(JobError):
    """What another program has written into an object is not what it would write: not trusted."""


_ALL_RIGHTS = "rekindle kubernetes check names every right that is missing"
_KINDS: Mapping[int, type[ApiError]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: MissingObjectError,
    409: ConflictError,
    410: ExpiredError,
}


def refusal(asked: str, status: int, said: Mapping[str, Any]) -> ApiError:
    """Make an error of a Status object. asked: the request in a few words."""
    reason, message = str(said.get("reason", "")), str(said.get("message", ""))
    kind = _KINDS.get(status, ApiError)
    if status == 504 and "Too large resource version" in message:
        kind = ExpiredError  # of a server that lags behind, or was restored from a backup
    said_of_us = f"; {_ALL_RIGHTS}" if status == 403 and 'User "' in message else ""
    told = f"{asked}: {message or reason or f'HTTP {status}'}{said_of_us}"
    return kind(told, status=status, reason=reason)


def said_in(data: bytes) -> Mapping[str, Any]:
    """Read a Status object; what is none becomes a message."""
    try:
        said = json.loads(data)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {"message": data.decode(errors="replace")[:200]}
