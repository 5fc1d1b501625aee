"""Apply strategic merge patches: merge maps, merge lists of named items by key, replace others."""

from __future__ import annotations

import copy
from typing import Any

from rekindle.engines.kubernetes.manifests import Manifest
from rekindle.errors import UsageError

PATCH = "$patch"
_DELETE, _REPLACE = "delete", "replace"

# The key of the items of a field. Ports of a container and of a Service have different keys. The
# first key that an item has counts.
_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "ownerReferences": ("uid",),
    "replicatedJobs": ("name",),  # JobSet
    "tasks": ("name",),  # Volcano
    "runtimePatches": ("manager",),  # TrainJob
}


def merge(manifest: Manifest, patch: Manifest, name: str = "") -> Manifest:
    """Return `manifest` with `patch` applied; both stay unchanged. name: of the patch, for errors.

    A value of null removes a field. `$patch: delete` in an item of a list removes the item that has
    the same key, in a map the map. `$patch: replace` makes a map replace the old map. As an item of
    a list, it makes that list replace the old list. Raises UsageError: the patch does not fit; the
    error names the place.
    """
    try:
        return _map(manifest, patch, "")
    except UsageError as error:
        raise UsageError(f"{name}: {error}" if name else str(error)) from None


def _map(old: Manifest, patch: Manifest, where: str) -> Manifest:
    directive = _directive(patch, where)
    if directive == _REPLACE:
        return _map({}, {key: value for key, value in patch.items() if key != PATCH}, where)
    if directive == _DELETE:
        if not where:
            raise UsageError(f"{PATCH}: {_DELETE} at the top would remove everything; name a field")
        return {}
    new = copy.deepcopy(old)
    for key, value in patch.items():
        at = f"{where}.{key}" if where else str(key)
        if value is None or _is_deletion(value, at):
            new.pop(key, None)
        else:
            new[key] = _value(key, old.get(key), value, at)
    return new


def _value(key: str, old: Any, value: Any, where: str) -> Any:
    if old is None:  # as if an empty value existed
        old = {} if isinstance(value, dict) else [] if isinstance(value, list) else ""
    if isinstance(old, dict) != isinstance(value, dict) or (
        isinstance(old, list) != isinstance(value, list)
    ):
        raise UsageError(
            f"the patch has {_kind(value)} at {where}, but the manifest has {_kind(old)}; write "
            f"{_kind(old)}"
        )
    if isinstance(old, dict):
        return _map(old, value, where)
    if isinstance(old, list):
        return _list(key, old, value, where)
    return value


def _list(key: str, old: list[Any], patch: list[Any], where: str) -> list[Any]:
    given = [item for item in patch if not _says(item, _REPLACE)]
    if key not in _KEYS or len(given) < len(patch):
        return [_clean(item, f"{where}[{n}]") for n, item in enumerate(given)]
    new = [copy.deepcopy(item) for item in old]
    for number, item in enumerate(patch):
        at = f"{where}[{number}]"
        name, mark = _mark(key, item, at)
        found = [n for n, one in enumerate(new) if isinstance(one, dict) and one.get(name) == mark]
        if _is_deletion(item, at):
            new = [one for n, one in enumerate(new) if n not in found]
        elif found:
            new[found[0]] = _map(new[found[0]], item, f"{where}[{name}={mark}]")
        else:
            new.append(_clean(item, at))
    return new


def _clean(value: Any, where: str) -> Any:
    """Return a value without nulls and directives."""
    if isinstance(value, dict):
        return _map({}, value, where or "patch")
    if isinstance(value, list):
        return [_clean(item, f"{where}[{n}]") for n, item in enumerate(value)]
    return value


def _mark(key: str, item: Any, where: str) -> tuple[str, Any]:
    names = _KEYS[key]
    if not isinstance(item, dict):
        raise UsageError(f"the patch has {_kind(item)} at {where}; write a map with {names[0]}")
    for name in names:
        if item.get(name) is not None:
            return name, item[name]
    raise UsageError(
        f"the patch has no {names[0]} at {where}, so it does not identify an item; add {names[0]}"
    )


def _directive(patch: Manifest, where: str) -> str | None:
    word = patch.get(PATCH)
    if word not in (None, _DELETE, _REPLACE):
        at = f" at {where}" if where else ""
        raise UsageError(f"{PATCH}: {word}{at} is unknown; write {_DELETE} or {_REPLACE}")
    return word


def _is_deletion(value: Any, where: str) -> bool:
    return isinstance(value, dict) and _directive(value, where) == _DELETE


def _says(item: Any, word: str) -> bool:
    """Return whether an item of a list is only a directive for the list."""
    return isinstance(item, dict) and item == {PATCH: word}


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a map"
    return "a list" if isinstance(value, list) else f"the value {value!r}"
