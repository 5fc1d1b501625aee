"""Discovery: the groups, versions and resources of the server."""

from __future__ import annotations

from cluster import kinds
from cluster.kinds import Kind
from cluster.refusals import Object

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCES: dict[Kind, list[tuple[str, str, list[str]]]] = {
    kinds.PODS: [
        ("binding", "Binding", ["create"]),
        ("eviction", "Eviction", ["create"]),
        ("log", "Pod", ["get"]),
        ("proxy", "PodProxyOptions", ["create", "delete", "get", "patch", "update"]),
    ],
    kinds.SERVICES: [
        ("proxy", "ServiceProxyOptions", ["create", "delete", "get", "patch", "update"])
    ],
    kinds.SERVICEACCOUNTS: [("token", "TokenRequest", ["create"])],
}
_REVIEWS = {
    "authorization.k8s.io": ("selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    "authentication.k8s.io": ("selfsubjectreviews", "SelfSubjectReview"),
}
VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0-rekindle-test",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}


def answer(known: tuple[Kind, ...], path: str) -> Object | None:
    """Return the answer of a discovery path, or None for an unknown path."""
    parts = path.strip("/").split("/")
    if parts == ["version"]:
        return VERSION
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        groups = [_group(known, name) for name in _groups(known)]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in _groups(known):
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(known, parts[1])}
    if parts == ["api", "v1"]:
        return _resources(known, "", "v1")
    if parts[0] == "apis" and len(parts) == 3:
        return _resources(known, parts[1], parts[2])
    return None


def _groups(known: tuple[Kind, ...]) -> list[str]:
    return [*dict.fromkeys(each.group for each in known if each.group), *_REVIEWS]


def _group(known: tuple[Kind, ...], name: str) -> Object:
    versions = dict.fromkeys(each.version for each in known if each.group == name) or ["v1"]
    listed = [{"groupVersion": f"{name}/{each}", "version": each} for each in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resources(known: tuple[Kind, ...], group: str, version: str) -> Object | None:
    found: list[Object] = []
    for kind in known:
        if (kind.group, kind.version) == (group, version):
            found += _listed(kind)
    if group in _REVIEWS and version == "v1":
        found.append(_entry(*_REVIEWS[group], False, ["create"]))
    if not found:
        return None
    of = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": of, "resources": found}


def _listed(kind: Kind) -> list[Object]:
    entry = _entry(kind.plural, kind.kind, kind.namespaced, _VERBS)
    entry["singularName"] = kind.kind.lower()
    if kind.short:
        entry["shortNames"] = list(kind.short)
    entries = [entry]
    if kind.has_status:
        name = f"{kind.plural}/status"
        entries.append(_entry(name, kind.kind, kind.namespaced, ["get", "patch", "update"]))
    for name, what, verbs in _SUBRESOURCES.get(kind, []):
        entries.append(_entry(f"{kind.plural}/{name}", what, kind.namespaced, verbs))
    return entries


def _entry(name: str, kind: str, namespaced: bool, verbs: list[str]) -> Object:
    return {
        "name": name,
        "singularName": "",
        "namespaced": namespaced,
        "kind": kind,
        "verbs": verbs,
    }
