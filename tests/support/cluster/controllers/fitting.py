"""Decide whether a pod can run on a node."""

from __future__ import annotations

from cluster import selectors
from cluster.quantities import amount, requests
from cluster.refusals import Object

_DONE = ("Succeeded", "Failed")


class Room:
    """A node, and the pods that run on it."""

    def __init__(self, node: Object) -> None:
        self.node = node
        self.name: str = node["metadata"]["name"]
        self.labels: dict[str, str] = node["metadata"].get("labels") or {}
        self.pods: list[Object] = []
        self.used: dict[str, float] = {"pods": 0.0}

    def add(self, pod: Object) -> None:
        self.pods.append(pod)
        self.used["pods"] += 1
        for name, value in requests(pod["spec"]).items():
            self.used[name] = self.used.get(name, 0.0) + value

    @property
    def load(self) -> float:
        return self.used["pods"]


def holds(pod: Object) -> bool:
    """Return whether the pod uses resources of its node."""
    return (pod.get("status") or {}).get("phase") not in _DONE


def obstacle(pod: Object, room: Room, rooms: list[Room]) -> str:
    """Return why the pod cannot run on the node, in the words of the scheduler; empty if it can."""
    spec, node = pod["spec"], room.node
    if node["spec"].get("unschedulable"):
        unschedulable = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
        if not tolerates(spec, unschedulable):
            return "node(s) were unschedulable"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] in ("NoSchedule", "NoExecute") and not tolerates(spec, taint):
            value = f": {taint['value']}" if taint.get("value") else ": "
            return f"node(s) had untolerated taint {{{taint['key']}{value}}}"
    if not selected(spec, room):
        return "node(s) didn't match Pod's node affinity/selector"
    status = node.get("status") or {}
    there = status.get("allocatable") or status.get("capacity") or {}
    for name, value in {"pods": 1.0, **requests(spec)}.items():
        if room.used.get(name, 0.0) + value > amount(there.get(name, 0)):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    if not _apart(pod, room, rooms):
        return "node(s) didn't match pod anti-affinity rules"
    return ""


def tolerates(spec: Object, taint: Object) -> bool:
    return any(_tolerates(each, taint) for each in spec.get("tolerations") or [])


def tolerated_for(spec: Object, taints: list[Object]) -> float | None:
    """Return the seconds that the pod can stay.

    0.0: the pod does not tolerate one of the taints. None: no limit.
    """
    shortest: float | None = None
    for taint in taints:
        found = [each for each in spec.get("tolerations") or [] if _tolerates(each, taint)]
        if not found:
            return 0.0
        limits = [each["tolerationSeconds"] for each in found if "tolerationSeconds" in each]
        if limits:
            least = float(min(limits))
            shortest = least if shortest is None else min(shortest, least)
    return shortest


def selected(spec: Object, room: Room) -> bool:
    """Return whether nodeSelector and the required node affinity of the pod select the node."""
    for name, value in (spec.get("nodeSelector") or {}).items():
        if room.labels.get(name) != value:
            return False
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    return any(_term(term, room) for term in affinity["nodeSelectorTerms"])


def _term(term: Object, room: Room) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return False
    return all(selectors.expression(each, room.labels) for each in expressions) and all(
        selectors.expression(each, {"metadata.name": room.name}) for each in fields
    )


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != taint["key"]:
        return False
    return operator == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _apart(pod: Object, room: Room, rooms: list[Room]) -> bool:
    """Return whether the required anti-affinity of the pod and of existing pods allows the node."""
    near: dict[str, list[Object]] = {}

    def around(key: str) -> list[Object]:
        if key not in near:
            where = room.labels.get(key)
            near[key] = [
                each
                for other in rooms
                if where is not None and other.labels.get(key) == where
                for each in other.pods
            ]
        return near[key]

    for term in _terms(pod):
        if any(_meets(term, pod, other) for other in around(term["topologyKey"])):
            return False
    for other_room in rooms:
        for other in other_room.pods:
            for term in _terms(other):
                key = term["topologyKey"]
                same = room.labels.get(key) is not None
                same = same and room.labels.get(key) == other_room.labels.get(key)
                if same and _meets(term, other, pod):
                    return False
    return True


def _terms(pod: Object) -> list[Object]:
    affinity = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    return affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []


def _meets(term: Object, whose: Object, other: Object) -> bool:
    namespaces = term.get("namespaces") or [whose["metadata"]["namespace"]]
    return other["metadata"]["namespace"] in namespaces and selectors.matches(
        term.get("labelSelector"), other["metadata"].get("labels") or {}
    )
