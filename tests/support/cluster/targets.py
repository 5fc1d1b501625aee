"""The object of a URL, and the verb of a request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cluster import kinds
from cluster.access import Request
from cluster.kinds import Kind

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class Target(msgspec.Struct, frozen=True):
    """A collection, an object or a subresource."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    rest: str = ""

    @property
    def resource(self) -> str:
        plural = self.kind.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural

    def request(self, verb: str) -> Request:
        # For access rules, a namespace is inside itself.
        inside = self.name if self.kind is kinds.NAMESPACES else self.namespace
        return Request(verb, self.kind.group, self.resource, inside, self.name)


def find(known: tuple[Kind, ...], path: str) -> Target | None:
    """Return the target of a URL's path, or None if the resource does not exist."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        group, version, parts = "", "v1", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, parts = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2 and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    if not parts:
        return None
    kind = next(
        (
            each
            for each in known
            if (each.group, each.version, each.plural) == (group, version, parts[0])
        ),
        None,
    )
    if kind is None or (namespace and not kind.namespaced):
        return None
    name = parts[1] if len(parts) > 1 else ""
    subresource = parts[2] if len(parts) > 2 else ""
    if name and kind.namespaced and not namespace:
        return None
    return Target(kind, namespace, name, subresource, "/".join(parts[3:]))


def verb(method: str, target: Target, query: Mapping[str, str]) -> str:
    """Return the verb of a request, as access rules and the log of requests use it."""
    if method in _VERBS:
        return _VERBS[method]
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if target.subresource:
        return "get"
    if watches(query):
        return "watch"
    return "get" if target.name else "list"


def watches(query: Mapping[str, str]) -> bool:
    return query.get("watch", "") in ("1", "true", "True")
