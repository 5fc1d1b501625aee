"""Label and field selectors, in the syntax of URLs and of objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cluster.refusals import Object, bad_request

Test = Callable[[Object], bool]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_PAIR = re.compile(r"^([^=!\s]+)\s*(==|=|!=)\s*([^=!\s]*)$")
_NAME = re.compile(r"^!?\s*[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")

_FIELDS: dict[str, tuple[str, ...]] = {
    "metadata.name": ("metadata", "name"),
    "metadata.namespace": ("metadata", "namespace"),
    "spec.nodeName": ("spec", "nodeName"),
    "spec.unschedulable": ("spec", "unschedulable"),
    "spec.restartPolicy": ("spec", "restartPolicy"),
    "status.phase": ("status", "phase"),
    "status.podIP": ("status", "podIP"),
    "type": ("type",),
    "reason": ("reason",),
    "involvedObject.kind": ("involvedObject", "kind"),
    "involvedObject.name": ("involvedObject", "name"),
    "involvedObject.namespace": ("involvedObject", "namespace"),
    "involvedObject.uid": ("involvedObject", "uid"),
}


def labels(text: str) -> Test:
    """Return the test of a label selector such as `a=b,c in (d,e),!f`."""
    tests = [_label(term.strip()) for term in _terms(text)]
    return lambda thing: all(test(thing["metadata"].get("labels") or {}) for test in tests)


def fields(text: str) -> Test:
    """Return the test of a field selector such as `metadata.name=x,status.phase!=Failed`."""
    tests = []
    for term in text.split(","):
        found = _PAIR.match(term.strip())
        if not found:
            raise bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
        name, operator, value = found.groups()
        if name not in _FIELDS:
            raise bad_request(f'field label not supported: "{name}"')
        tests.append((_FIELDS[name], value, operator == "!="))
    return lambda thing: all(
        (_value(thing, path) == value) != negated for path, value, negated in tests
    )


def matches(selector: Object | None, found: dict[str, str]) -> bool:
    """Return whether labels match a selector with matchLabels and matchExpressions."""
    selector = selector or {}
    for name, value in (selector.get("matchLabels") or {}).items():
        if found.get(name) != value:
            return False
    return all(expression(each, found) for each in selector.get("matchExpressions") or [])


def expression(each: Object, found: dict[str, str]) -> bool:
    """Return whether labels match one of matchExpressions."""
    key, operator, values = each["key"], each["operator"], each.get("values") or []
    if operator == "In":
        return found.get(key) in values
    if operator == "NotIn":
        return found.get(key) not in values
    if operator == "Exists":
        return key in found
    if operator == "DoesNotExist":
        return key not in found
    if operator in ("Gt", "Lt"):
        if key not in found:
            return False
        return (
            int(found[key]) > int(values[0])
            if operator == "Gt"
            else int(found[key]) < int(values[0])
        )
    raise bad_request(f"{operator!r} is not a valid label selector operator")


def _terms(text: str) -> list[str]:
    return [term for term in re.split(r",(?![^()]*\))", text) if term.strip()]


def _label(term: str) -> Callable[[dict[str, str]], bool]:
    if found := _SET.match(term):
        name, operator, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda them: them.get(name) in values
        return lambda them: them.get(name) not in values
    if found := _PAIR.match(term):
        name, operator, value = found.groups()
        return lambda them: (them.get(name) == value) != (operator == "!=")
    if _NAME.match(term):
        name = term.lstrip("! ")
        absent = term.startswith("!")
        return lambda them: (name in them) != absent
    raise bad_request(f"unable to parse requirement: found '{term}'")


def _value(thing: Any, path: tuple[str, ...]) -> str:
    for name in path:
        thing = (thing or {}).get(name)
    if isinstance(thing, bool):
        return str(thing).lower()
    return "" if thing is None else str(thing)
