"""The refusals of the server, with the messages of a real server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.kinds import Kind

Object = dict[str, Any]


class Refused(Exception):
    """A refusal that ends a request with a Status object."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> Object:
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def _of(kind: Kind, name: str) -> Object:
    details = {"name": name, "kind": kind.plural}
    return {**details, "group": kind.group} if kind.group else details


def not_found(kind: Kind, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind.resource} "{name}" not found', **_of(kind, name))


def exists(kind: Kind, name: str) -> Refused:
    message = f'{kind.resource} "{name}" already exists'
    return Refused(409, "AlreadyExists", message, **_of(kind, name))


def conflict(kind: Kind, name: str, why: str = "") -> Refused:
    why = why or (
        "the object has been modified; please apply your changes to the latest version"
        " and try again"
    )
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}'
    return Refused(409, "Conflict", message, **_of(kind, name))


def forbidden(kind: Kind, name: str, why: str) -> Refused:
    message = f'{kind.resource} "{name}" is forbidden: {why}'
    return Refused(403, "Forbidden", message, **_of(kind, name))


def invalid(kind: Kind, name: str, *causes: tuple[str, str, str]) -> Refused:
    """Return a refusal of an invalid object.

    `causes`: field, reason (Invalid, Required, Forbidden and so on), end of the message.
    """
    words = {
        "Invalid": ("FieldValueInvalid", "Invalid value"),
        "Required": ("FieldValueRequired", "Required value"),
        "Forbidden": ("FieldValueForbidden", "Forbidden"),
        "NotSupported": ("FieldValueNotSupported", "Unsupported value"),
        "TooLong": ("FieldValueTooLong", "Too long"),
    }
    listed = [
        {"reason": words[reason][0], "message": f"{words[reason][1]}: {text}", "field": field}
        for field, reason, text in causes
    ]
    texts = [f"{each['field']}: {each['message']}" for each in listed]
    what = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    message = f'{kind.qualified} "{name}" is invalid: {what}'
    details = {"name": name, "group": kind.group, "kind": kind.kind, "causes": listed}
    return Refused(422, "Invalid", message, **details)


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def unauthorized() -> Refused:
    return Refused(401, "Unauthorized", "Unauthorized")


def not_allowed() -> Refused:
    message = "the server does not allow this method on the requested resource"
    return Refused(405, "MethodNotAllowed", message)


def expired(asked: int, oldest: int) -> Refused:
    return Refused(410, "Expired", f"too old resource version: {asked} ({oldest})")


def compacted() -> Refused:
    message = "The resourceVersion for the provided list is too old."
    return Refused(410, "Expired", message)


def too_large(asked: int, current: int) -> Refused:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return Refused(504, "Timeout", message, causes=causes, retryAfterSeconds=1)


def unsupported_patch(media_type: str, known: list[str]) -> Refused:
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        f"{', '.join(known)}"
    )
    return Refused(415, "UnsupportedMediaType", message)


def unsupported_dry_run(asked: Iterable[str]) -> Refused:
    listed = " ".join(f'"{each}"' for each in sorted(asked))
    text = f'Unsupported value: [{listed}]: supported values: "All"'
    message = f'CreateOptions.meta.k8s.io "" is invalid: dryRun: {text}'
    return Refused(422, "Invalid", message)


def injected(code: int, retry_after: int | None = None) -> Refused:
    """Return the refusal of an injected fault, with the message of a real server for this code."""
    reasons = {
        401: ("Unauthorized", "Unauthorized"),
        403: ("Forbidden", "forbidden: RBAC: the authorizer has not synced yet"),
        404: ("NotFound", "the server could not find the requested resource"),
        409: ("Conflict", "Operation cannot be fulfilled: the object has been modified"),
        410: ("Expired", "too old resource version: 1 (2216)"),
        429: ("TooManyRequests", "Too many requests, please try again later."),
        500: ("InternalError", "Internal error occurred: etcdserver: leader changed"),
        503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
        504: ("Timeout", "Timeout: request did not complete within requested timeout"),
    }
    reason, message = reasons.get(code, ("Unknown", f"injected {code}"))
    if retry_after is None:
        return Refused(code, reason, message)
    return Refused(code, reason, message, retryAfterSeconds=retry_after)
