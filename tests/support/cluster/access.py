"""Authentication and authorization: tokens, roles and role bindings."""

from __future__ import annotations

import base64
import csv
import hashlib
import hmac
from pathlib import Path

import msgspec

from cluster import kinds, refusals
from cluster.kinds import Kind
from cluster.refusals import Object, Refused
from cluster.store import Store

MASTERS = "system:masters"


class User(msgspec.Struct, frozen=True):
    """The user that sent a request."""

    name: str
    groups: tuple[str, ...]

    @property
    def is_master(self) -> bool:
        return MASTERS in self.groups


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


class Request(msgspec.Struct, frozen=True):
    """The attributes of a request that RBAC rules evaluate."""

    verb: str
    group: str = ""
    resource: str = ""  # with the subresource, for example pods/log
    namespace: str = ""
    name: str = ""
    path: str = ""  # the URL path of a request that is not for a resource


class Users:
    """The users of the tokens in a file (token,user,uid,"groups") and of the tokens issued here."""

    def __init__(self, store: Store, file: Path) -> None:
        self._store = store
        self._static: dict[str, User] = {}
        with file.open(newline="") as lines:
            for row in csv.reader(lines):
                token, name = row[0], row[1]
                groups = tuple(row[3].split(",")) if len(row) > 3 else ()
                self._static[token] = User(name, (*groups, "system:authenticated"))
        self._key = hashlib.sha256(file.read_bytes()).digest()

    def issue(self, account: Object) -> str:
        """Return a token of a service account. The token is valid as long as the account exists."""
        metadata = account["metadata"]
        text = f"{metadata['namespace']}/{metadata['name']}/{metadata['uid']}".encode()
        encoded = base64.urlsafe_b64encode(text).decode().rstrip("=")
        return f"sa.{encoded}.{self._sign(encoded)}"

    def of(self, header: str) -> User:
        """Return the user of an Authorization header.

        Raises Refused: the token is invalid (401).
        """
        if not header:
            return ANONYMOUS
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer":
            raise refusals.unauthorized()
        if known := self._static.get(token):
            return known
        parts = token.split(".")
        if len(parts) != 3 or not hmac.compare_digest(self._sign(parts[1]), parts[2]):
            raise refusals.unauthorized()
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        namespace, name, uid = base64.urlsafe_b64decode(padded).decode().split("/")
        account = self._store.look(kinds.SERVICEACCOUNTS, namespace, name)
        if account is None or account["metadata"]["uid"] != uid:
            raise refusals.unauthorized()
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
        return User(f"system:serviceaccount:{namespace}:{name}", (*groups, "system:authenticated"))

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()[:32]


def allowed(store: Store, user: User, request: Request) -> str | None:
    """Return the reason why the request is allowed, or None if it is not."""
    if user.is_master:
        return "RBAC: system:masters"
    if request.path and "system:authenticated" in user.groups and _is_discovery(request.path):
        return "RBAC: system:discovery"
    for binding in store.all(kinds.CLUSTERROLEBINDINGS):
        if _is_bound(binding, user, "") and _rules_allow(store, binding, "", request):
            return _because(binding, user)
    if request.namespace:
        for binding in store.all(kinds.ROLEBINDINGS, request.namespace):
            if _is_bound(binding, user, request.namespace) and _rules_allow(
                store, binding, request.namespace, request
            ):
                return _because(binding, user)
    return None


def denial(user: User, kind: Kind | None, request: Request) -> Refused:
    """Return the refusal of a request that is not allowed, with the message of a real server."""
    if request.path:
        message = f'forbidden: User "{user.name}" cannot {request.verb} path "{request.path}"'
        return Refused(403, "Forbidden", message)
    scope = (
        f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
    )
    resource = kind.resource if kind else request.resource
    named = f'{resource} "{request.name}"' if request.name else resource
    message = (
        f'{named} is forbidden: User "{user.name}" cannot {request.verb} resource'
        f' "{request.resource}" in API group "{request.group}" {scope}'
    )
    details = {"kind": request.resource.split("/")[0]}
    if request.name:
        details["name"] = request.name
    if request.group:
        details["group"] = request.group
    return Refused(403, "Forbidden", message, **details)


def _is_bound(binding: Object, user: User, namespace: str) -> bool:
    for subject in binding.get("subjects") or []:
        if subject["kind"] == "Group" and subject["name"] in user.groups:
            return True
        if subject["kind"] == "User" and subject["name"] == user.name:
            return True
        if subject["kind"] == "ServiceAccount":
            place = subject.get("namespace") or namespace
            if user.name == f"system:serviceaccount:{place}:{subject['name']}":
                return True
    return False


def _rules_allow(store: Store, binding: Object, namespace: str, request: Request) -> bool:
    reference = binding["roleRef"]
    if reference["kind"] == "ClusterRole":
        role = store.look(kinds.CLUSTERROLES, "", reference["name"])
    else:
        role = store.look(kinds.ROLES, namespace, reference["name"])
    return role is not None and any(_rule_allows(rule, request) for rule in role.get("rules") or [])


def _rule_allows(rule: Object, request: Request) -> bool:
    verbs = rule.get("verbs") or []
    if "*" not in verbs and request.verb not in verbs:
        return False
    if request.path:
        return any(
            url in ("*", request.path) or (url.endswith("*") and request.path.startswith(url[:-1]))
            for url in rule.get("nonResourceURLs") or []
        )
    groups, resources = rule.get("apiGroups") or [], rule.get("resources") or []
    if "*" not in groups and request.group not in groups:
        return False
    subresource = request.resource.partition("/")[2]
    wanted = {"*", request.resource} | ({f"*/{subresource}"} if subresource else set())
    if not wanted & set(resources):
        return False
    names = rule.get("resourceNames") or []
    return not names or request.name in names


def _is_discovery(path: str) -> bool:
    known = ("/api", "/apis", "/version", "/healthz", "/livez", "/readyz", "/openapi")
    return path in known or path.startswith(tuple(f"{each}/" for each in known))


def _because(binding: Object, user: User) -> str:
    metadata, reference = binding["metadata"], binding["roleRef"]
    place = f"/{metadata['namespace']}" if "namespace" in metadata else ""
    text = f'"{metadata["name"]}{place}" of {reference["kind"]} "{reference["name"]}"'
    return f'RBAC: allowed by {binding["kind"]} {text} to User "{user.name}"'
