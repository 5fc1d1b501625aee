"""The kinds of patches that the engine, the kubelet and the controllers use.

A merge patch replaces lists. A strategic merge and server-side apply merge lists whose elements
have a key.
"""

from __future__ import annotations

from typing import Any

from cluster.refusals import Object

# The keys that identify the elements of a list, by the name of the list in any object.
_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "replicatedJobs": ("name",),
    "ports": ("containerPort", "port"),
    "conditions": ("type",),
    "addresses": ("type",),
    "ownerReferences": ("uid",),
}


def merge(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def strategic(target: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: merge maps, and lists whose elements have a key."""
    return _merge("", target, patch, None)


def apply(live: Object, last: Object, wanted: Object) -> Object:
    """Apply like `strategic`, and remove fields of `last` that `wanted` does not have."""
    result: Object = _merge("", live, wanted, last)
    return result


def _merge(name: str, old: Any, new: Any, last: Any) -> Any:
    if isinstance(new, dict):
        old, last = (each if isinstance(each, dict) else {} for each in (old, last))
        result = {key: value for key, value in old.items() if key in new or key not in last}
        for key, value in new.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merge(key, result.get(key), value, last.get(key))
        return result
    if isinstance(new, list):
        old, last = (each if isinstance(each, list) else [] for each in (old, last))
        key = _key(name, [*old, *new])
        if key:
            maps = ({each[key]: each for each in some if key in each} for some in (old, new, last))
            return list(_merge("", *maps).values())
    return new


def _key(name: str, elements: list[Any]) -> str:
    """Return the key that all elements have, or "" if the list is merged as one value."""
    if not all(isinstance(each, dict) for each in elements):
        return ""
    known = _KEYS.get(name, ())
    return next((key for key in known if all(key in each for each in elements)), "")
