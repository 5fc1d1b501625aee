"""Which manager has set which fields of an object, and server-side apply."""

from __future__ import annotations

import json
from typing import Any

from cluster.kinds import Kind
from cluster.patches import SETS, merge_key
from cluster.refusals import Object, Refused
from cluster.store import fresh

Path = tuple[str, ...]

# Of server-side apply alone: by protocol too, and the jobs in a JobSet.
_APPLY_KEYS = {
    "ports": ("containerPort", "protocol"),
    "replicatedJobs": ("name",),
    "hostAliases": ("ip",),
}
_UNOWNED = {"apiVersion", "kind"}
_UNOWNED_METADATA = {
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "generateName",
}


class Item:
    """The value of an element of a list that has keys: that it is there."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item)

    def __hash__(self) -> int:
        return 0


Fields = dict[Path, Any]


def fields(thing: Object) -> Fields:
    """Every field that can be owned, with its value."""
    found: Fields = {}
    for name, value in thing.items():
        if name == "metadata":
            owned = {key: each for key, each in value.items() if key not in _UNOWNED_METADATA}
            if owned:
                _flatten(("f:metadata",), "metadata", owned, found)
        elif name not in _UNOWNED:
            _flatten((f"f:{name}",), name, value, found)
    return found


def apply(
    kind: Kind, live: Object | None, wanted: Object, manager: str, force: bool
) -> tuple[Object, list[Object]]:
    """The object with what the manager wants of it, and who then owns what."""
    wanted = fresh(wanted)
    wanted.get("metadata", {}).pop("managedFields", None)
    wanted = {key: value for key, value in wanted.items() if value is not None}
    new = fields(wanted)
    if live is None:
        return wanted, [_entry(manager, "Apply", set(new), kind)]
    entries = _decode(live)
    now = fields(live)
    own = (manager, "Apply", "")
    conflicts = sorted(
        (other[0], path)
        for other, paths in entries.items()
        if other[:2] != own[:2]
        for path in paths
        if path in new and path in now and new[path] != now[path]
    )
    if conflicts and not force:
        raise _conflict(kind, conflicts)
    result = _merge("", live, wanted)
    others = set().union(*(paths for other, paths in entries.items() if other != own))
    for path in sorted(entries.get(own, set()) - set(new), key=len, reverse=True):
        if path not in others:
            _remove(result, path)
    for _, path in conflicts:
        for other, paths in entries.items():
            if other != own:
                paths.discard(path)
    entries[own] = set(new)
    return result, _encode(entries, kind)


def updated(
    kind: Kind, before: Object | None, after: Object, manager: str, subresource: str = ""
) -> list[Object]:
    """Who owns what, once this manager has written the object as it is."""
    old = fields(before) if before else {}
    new = fields(after)
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    entries = _decode(before) if before else {}
    own = (manager, "Update", subresource)
    for other, paths in entries.items():
        entries[other] = {path for path in paths if path in new}
        if other != own:
            entries[other] -= changed
    if changed:
        entries[own] = entries.get(own, set()) | changed
    return _encode(entries, kind)


def _flatten(path: Path, name: str, value: Any, found: Fields) -> None:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            _flatten((*path, f"f:{key}"), key, each, found)
    elif isinstance(value, list) and value and (keys := _keys(name, value)):
        for each in value:
            item = (*path, _item(keys, each))
            found[item] = Item()
            for key, inner in each.items():
                _flatten((*item, f"f:{key}"), key, inner, found)
    elif isinstance(value, list) and name in SETS:
        for each in value:
            found[(*path, f"v:{json.dumps(each)}")] = each
    else:
        found[path] = value


def _keys(name: str, value: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(each, dict) for each in value):
        return ()
    keys = _APPLY_KEYS.get(name) or merge_key(name, value)
    if name == "ports" and any("port" in each for each in value):
        keys = ("port", "protocol")
    return keys if all(keys[0] in each for each in value if keys) else ()


def _item(keys: tuple[str, ...], each: Object) -> str:
    told = {key: each.get(key, "TCP" if key == "protocol" else None) for key in keys}
    return f"k:{json.dumps(told, sort_keys=True)}"


def _merge(name: str, live: Any, wanted: Any) -> Any:
    if isinstance(wanted, dict) and isinstance(live, dict):
        result = dict(live)
        for key, value in wanted.items():
            result[key] = _merge(key, live.get(key), value) if key in live else value
        return result
    if isinstance(wanted, list) and isinstance(live, list):
        if name in SETS:
            return live + [each for each in wanted if each not in live]
        keys = _keys(name, [*live, *wanted])
        if keys:
            result_list = list(live)
            places = {_item(keys, each): i for i, each in enumerate(live)}
            for each in wanted:
                place = places.get(_item(keys, each))
                if place is None:
                    result_list.append(each)
                else:
                    result_list[place] = _merge("", live[place], each)
            return result_list
    return wanted


def _remove(thing: Any, path: Path, name: str = "") -> None:
    first, rest = path[0], path[1:]
    if first.startswith("f:"):
        key = first[2:]
        if not isinstance(thing, dict) or key not in thing:
            return
        if rest:
            _remove(thing[key], rest, key)
            if thing[key] == {} or thing[key] == []:
                del thing[key]
        else:
            del thing[key]
    elif isinstance(thing, list) and first.startswith("v:"):
        value = json.loads(first[2:])
        if value in thing:
            thing.remove(value)
    elif isinstance(thing, list):
        keys = tuple(json.loads(first[2:]))
        for place, each in enumerate(thing):
            if _item(keys, each) == first or _item(tuple(sorted(keys)), each) == first:
                if rest:
                    _remove(each, rest)
                else:
                    del thing[place]
                return


Entries = dict[tuple[str, str, str], set[Path]]


def _decode(thing: Object) -> Entries:
    entries: Entries = {}
    for each in thing["metadata"].get("managedFields") or []:
        paths: set[Path] = set()
        _read(each.get("fieldsV1") or {}, (), paths)
        entries[each["manager"], each["operation"], each.get("subresource", "")] = paths
    return entries


def _read(node: Object, path: Path, paths: set[Path]) -> None:
    if path and (not node or "." in node):
        paths.add(path)
    for name, inner in node.items():
        if name != ".":
            _read(inner, (*path, name), paths)


def _encode(entries: Entries, kind: Kind) -> list[Object]:
    return [
        _entry(manager, operation, paths, kind, subresource)
        for (manager, operation, subresource), paths in entries.items()
        if paths
    ]


def _entry(
    manager: str, operation: str, paths: set[Path], kind: Kind, subresource: str = ""
) -> Object:
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        if path[-1].startswith("k:"):
            node["."] = {}
    entry = {
        "manager": manager,
        "operation": operation,
        "apiVersion": kind.api_version,
        "fieldsType": "FieldsV1",
        "fieldsV1": tree,
    }
    return {**entry, "subresource": subresource} if subresource else entry


def _conflict(kind: Kind, conflicts: list[tuple[str, Path]]) -> Refused:
    def told(path: Path) -> str:
        return "".join(
            f".{part[2:]}" if part.startswith("f:") else f"[{part[2:]}]" for part in path
        )

    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}"',
            "field": told(path),
        }
        for manager, path in conflicts
    ]
    which = ", ".join(f'"{manager}": {told(path)}' for manager, path in conflicts[:1])
    count = f"{len(conflicts)} conflict{'s' if len(conflicts) > 1 else ''}"
    message = f"Apply failed with {count}: conflict{'s' if len(conflicts) > 1 else ''} with {which}"
    return Refused(409, "Conflict", message, causes=causes)
