"""The three kinds of patches that need no manager: merge, JSON and strategic merge."""

from __future__ import annotations

from typing import Any

from cluster.refusals import Object, Refused, bad_request
from cluster.store import fresh

# By which key the elements of a list are told apart, wherever in an object it is.
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "conditions": ("type",),
    "addresses": ("type",),
    "ownerReferences": ("uid",),
    "secrets": ("name",),
}
# A strategic merge knows a port by its number alone; apply by number and protocol.
_PORTS = {"containerPort": ("containerPort",), "port": ("port",)}
# Lists of plain values that are merged as sets.
SETS = {"finalizers"}


def merge(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def json_patch(target: Any, operations: Any) -> Any:
    """RFC 6902."""
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    target = fresh(target)
    for operation in operations:
        target = _operate(target, operation)
    return target


def strategic(target: Any, patch: Any) -> Any:
    """Merges maps, and lists of things that have a key."""
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch")
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    if directive == "delete":
        return {}
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, list):
            result[name] = _merge_lists(name, result.get(name) or [], value)
        else:
            result[name] = strategic(result.get(name), value)
    return _delete_listed(result, patch)


def merge_key(name: str, elements: list[Any]) -> tuple[str, ...]:
    """What tells the elements of this list apart; nothing where the list is one value."""
    if name == "ports":
        for found, key in _PORTS.items():
            if any(isinstance(each, dict) and found in each for each in elements):
                return key
    return MERGE_KEYS.get(name, ())


def _merge_lists(name: str, old: list[Any], new: list[Any]) -> list[Any]:
    if any(isinstance(each, dict) and each.get("$patch") == "replace" for each in new):
        return [each for each in new if not (isinstance(each, dict) and "$patch" in each)]
    if name in SETS:
        return old + [each for each in new if each not in old]
    keys = merge_key(name, [*old, *new])
    if not keys or not all(isinstance(each, dict) for each in [*old, *new]):
        return new
    result = list(old)
    for each in new:
        if not all(key in each for key in keys):
            raise bad_request(f"map: {each} does not contain declared merge key: {keys[0]}")
        place = next(
            (i for i, known in enumerate(result) if all(known.get(k) == each[k] for k in keys)),
            None,
        )
        if each.get("$patch") == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append(strategic({}, each))
        else:
            result[place] = strategic(result[place], each)
    return result


def _delete_listed(result: Object, patch: Object) -> Object:
    for name, values in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            of = name.split("/", 1)[1]
            result[of] = [each for each in result.get(of) or [] if each not in values]
        elif name == "$retainKeys":
            result = {known: result[known] for known in result if known in values}
    return result


def _operate(target: Any, operation: Object) -> Any:
    try:
        name, path = operation["op"], _pointer(operation["path"])
        if name in ("move", "copy"):
            source = _pointer(operation["from"])
            value = fresh(_find(target, source))
            if name == "move":
                target = _change(target, source, "remove", None)
            return _change(target, path, "add", value)
        if name == "test":
            if _find(target, path) != operation["value"]:
                raise LookupError(f"testing value {operation['path']} failed")
            return target
        if name not in ("add", "remove", "replace"):
            raise bad_request(f"Unexpected kind: {name}")
        return _change(target, path, name, operation.get("value"))
    except (LookupError, ValueError, TypeError) as error:
        message = f"the server rejected our request due to an error in our request: {error}"
        raise Refused(422, "Invalid", message) from error


def _pointer(text: str) -> list[str]:
    if text == "":
        return []
    if not text.startswith("/"):
        raise ValueError(f"not a JSON pointer: {text}")
    return [part.replace("~1", "/").replace("~0", "~") for part in text[1:].split("/")]


def _find(target: Any, path: list[str]) -> Any:
    for part in path:
        target = target[int(part)] if isinstance(target, list) else target[part]
    return target


def _change(target: Any, path: list[str], name: str, value: Any) -> Any:
    if not path:
        return value
    parent, last = _find(target, path[:-1]), path[-1]
    if isinstance(parent, list):
        place = len(parent) if last == "-" else int(last)
        if name == "add":
            if place > len(parent):
                raise LookupError(f"invalid index {last}")
            parent.insert(place, value)
        elif name == "remove":
            del parent[place]
        else:
            parent[place] = value
    elif name == "add" or last in parent:
        if name == "remove":
            del parent[last]
        else:
            parent[last] = value
    else:
        raise LookupError(f"{name} operation does not apply: doc is missing key: {'/'.join(path)}")
    return target
