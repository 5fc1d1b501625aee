"""Validation of pods: the rules for their fields, and the fields that can change."""

from __future__ import annotations

import json
import re
from typing import Any

from cluster.refusals import Object
from cluster.store import fresh

Cause = tuple[str, str, str]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def check(spec: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    if not spec.get("containers"):
        causes.append((f"{path}.containers", "Required", ""))
    names = set()
    for place, container in enumerate(spec.get("containers") or []):
        where = f"{path}.containers[{place}]"
        name = container.get("name", "")
        if not name:
            causes.append((f"{where}.name", "Required", ""))
        elif not _LABEL.fullmatch(name) or len(name) > 63:
            causes.append((f"{where}.name", "Invalid", f'"{name}": a lowercase RFC 1123 label'))
        elif name in names:
            causes.append((f"{where}.name", "Invalid", f'"{name}": Duplicate value'))
        names.add(name)
        if not container.get("image"):
            causes.append((f"{where}.image", "Required", ""))
        volumes = {volume.get("name") for volume in spec.get("volumes") or []}
        for index, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                text = f'"{mount.get("name")}": Not found'
                causes.append((f"{where}.volumeMounts[{index}].name", "Invalid", text))
    return causes


def frozen(spec: Object, gated: bool) -> Object:
    spec = fresh(spec)
    for name in ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"):
        spec.pop(name, None)
    if gated:
        spec.pop("schedulingGates", None)
        spec.pop("nodeSelector", None)
        spec.pop("affinity", None)
    for container in (spec.get("containers") or []) + (spec.get("initContainers") or []):
        container.pop("image", None)
    return spec


def _frozen_volcano(spec: Object) -> Object:
    spec = fresh(spec)
    for name in ("minAvailable", "priorityClassName"):
        spec.pop(name, None)
    for task in spec.get("tasks") or []:
        task.pop("replicas", None)
        task.pop("minAvailable", None)
    return spec


def brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 400 else f"{text[:400]}..."
