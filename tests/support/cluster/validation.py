"""Validation of objects: the rules for their fields, and the fields that can change."""

from __future__ import annotations

import json
import re

from cluster import job_rules, kinds, pod_rules
from cluster.kinds import Kind
from cluster.pod_rules import Cause, brief
from cluster.refusals import Object, invalid
from cluster.store import fresh

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_NAME = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or"
    " '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used"
    f" for validation is '{_SUBDOMAIN.pattern}')"
)
_MOST_DATA = 1 << 20  # bytes of keys and values of a ConfigMap
_IMMUTABLE = "field is immutable"
_POD_CHANGE = (
    "pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only"
    " additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set"
    " to 1 if it was previously negative)"
)


def name_of(kind: Kind, metadata: Object) -> None:
    """Refuse invalid names and labels.

    Raises Refused: a name or a label is invalid (422).
    """
    name, causes = metadata.get("name", ""), []
    if not name:
        causes.append(("metadata.name", "Required", "name or generateName is required"))
    elif kind.group == "rbac.authorization.k8s.io":
        if "/" in name or "%" in name or name in (".", ".."):
            causes.append(("metadata.name", "Invalid", f"\"{name}\": may not contain '/'"))
    elif kind is kinds.NAMESPACES or kind is kinds.SERVICES:
        pattern = _DNS1035 if kind is kinds.SERVICES else _LABEL
        if len(name) > 63 or not pattern.fullmatch(name):
            text = "a DNS-1035 label must consist of lower case alphanumeric characters or '-'"
            causes.append(("metadata.name", "Invalid", f'"{name}": {text}'))
    elif len(name) > 253:
        causes.append(("metadata.name", "Invalid", f'"{name}": must be no more than 253 bytes'))
    elif not _SUBDOMAIN.fullmatch(name):
        causes.append(("metadata.name", "Invalid", f'"{name}": {_SUBDOMAIN_TEXT}'))
    for key, value in (metadata.get("labels") or {}).items():
        if not _LABEL_NAME.fullmatch(key):
            text = f'"{key}": name part must consist of alphanumeric characters'
            causes.append(("metadata.labels", "Invalid", text))
        if not isinstance(value, str) or len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
            text = f"{json.dumps(value)}: a valid label must be an empty string or consist of"
            text += " alphanumeric characters, '-', '_' or '.', no more than 63 bytes"
            causes.append(("metadata.labels", "Invalid", text))
    if causes:
        raise invalid(kind, name, *causes)


def created(kind: Kind, thing: Object) -> None:
    """Refuse the creation of an invalid object.

    Raises Refused: the object is invalid (422).
    """
    causes: list[Cause] = []
    spec = thing.get("spec") or {}
    if kind is kinds.PODS:
        causes += pod_rules.check(spec, "spec")
    elif kind is kinds.JOBS:
        causes += job_rules.rules(thing["metadata"]["name"], spec)
    elif kind is kinds.JOBSETS:
        causes += [] if spec.get("replicatedJobs") else [("spec.replicatedJobs", "Required", "")]
    elif kind is kinds.CONFIGMAPS:
        causes += _config_map(thing)
    if causes:
        raise invalid(kind, thing["metadata"]["name"], *causes)


def _config_map(thing: Object) -> list[Cause]:
    data: dict[str, str] = thing.get("data") or {}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in data.items())
    text = f"may not be more than {_MOST_DATA} bytes"
    return [("", "TooLong", text)] if size > _MOST_DATA else []


def changed(kind: Kind, before: Object, after: Object) -> None:
    """Refuse changes of immutable fields.

    Raises Refused: the change is invalid (422).
    """
    old, new = before.get("spec") or {}, after.get("spec") or {}
    name = after["metadata"]["name"]
    causes: list[Cause] = []
    if kind is kinds.PODS:
        gated = bool(old.get("schedulingGates"))
        if pod_rules.frozen(old, gated) != pod_rules.frozen(new, gated):
            causes.append(("spec", "Forbidden", _POD_CHANGE))
    elif kind is kinds.JOBS:
        causes += job_rules.rules(name, new) + job_rules.changes(before, after)
    elif kind is kinds.VOLCANOJOBS:
        if _frozen_volcano(old) != _frozen_volcano(new):
            text = (
                "job updates may not change fields other than `minAvailable`,"
                " `tasks[*].replicas under spec`"
            )
            causes.append(("spec", "Forbidden", text))
    elif kind is kinds.JOBSETS:
        causes += _changed_jobset(old, new)
    elif kind is kinds.TRAINJOBS:
        causes += _changed_trainjob(before, after)
    elif kind is kinds.CONFIGMAPS:
        causes += _config_map(after) + _changed_other(kind, before, after)
    else:
        causes += _changed_other(kind, before, after)
    if causes:
        raise invalid(kind, name, *causes)


def _changed_other(kind: Kind, before: Object, after: Object) -> list[Cause]:
    if kind in (kinds.CONFIGMAPS, kinds.SECRETS) and before.get("immutable"):
        if any(before.get(field) != after.get(field) for field in ("data", "binaryData")):
            return [("data", "Forbidden", "field is immutable when `immutable` is set")]
    if kind in (kinds.ROLEBINDINGS, kinds.CLUSTERROLEBINDINGS):
        if before.get("roleRef") != after.get("roleRef"):
            return [("roleRef", "Invalid", "cannot change roleRef")]
    return []


def _changed_jobset(old: Object, new: Object) -> list[Cause]:
    """Return the invalid changes of a JobSet.

    Only `suspend` can change, and the engine changes nothing else.
    """
    return [
        (f"spec.{name}", "Invalid", f"{brief(new.get(name))}: {_IMMUTABLE}")
        for name in sorted((set(old) | set(new)) - {"suspend"})
        if old.get(name) != new.get(name)
    ]


def _changed_trainjob(before: Object, after: Object) -> list[Cause]:
    old, new = before["spec"], after["spec"]
    free = {"suspend"}
    return [
        (f"spec.{name}", "Invalid", f"{brief(new.get(name))}: {_IMMUTABLE}")
        for name in sorted((set(old) | set(new)) - free)
        if old.get(name) != new.get(name)
    ]


def _frozen_volcano(spec: Object) -> Object:
    spec = fresh(spec)
    for name in ("minAvailable", "priorityClassName"):
        spec.pop(name, None)
    for task in spec.get("tasks") or []:
        task.pop("replicas", None)
        task.pop("minAvailable", None)
    return spec
