"""Functions that all controllers of pods share."""

from __future__ import annotations

import contextlib

from cluster import kinds
from cluster.controllers.loop import is_deleted, owner_reference
from cluster.deleting import DeleteOptions, delete
from cluster.kinds import Kind
from cluster.operations import Operations
from cluster.proxying import is_ready
from cluster.refusals import Object, Refused
from cluster.store import Store, fresh


def owned(store: Store, uid: str, namespace: str) -> list[Object]:
    """Return the pods of this namespace that the object with this uid controls."""
    return [
        pod
        for pod in store.all(kinds.PODS, namespace)
        if any(
            each["uid"] == uid and each.get("controller")
            for each in pod["metadata"].get("ownerReferences") or []
        )
    ]


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def is_active(pod: Object) -> bool:
    return phase(pod) not in ("Succeeded", "Failed") and not is_deleted(pod)


def index_of(pod: Object, label: str) -> int:
    return int((pod["metadata"].get("labels") or {}).get(label, -1))


def restarts(pod: Object) -> int:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return sum(each.get("restartCount", 0) for each in statuses)


def make(kind: Kind, owner: Object, template: Object, name: str, **spec: object) -> Object:
    """Return a pod of the template, controlled by the owner."""
    made = fresh(template)
    metadata = made.setdefault("metadata", {})
    metadata.pop("creationTimestamp", None)
    metadata["name"] = name
    metadata["namespace"] = owner["metadata"]["namespace"]
    metadata["ownerReferences"] = [owner_reference(kind, owner)]
    made.setdefault("spec", {}).update(spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made["spec"]}


def label(pod: Object, **labels: str) -> None:
    pod["metadata"].setdefault("labels", {}).update(labels)


def add_environment(pod: Object, values: dict[str, str], containers: str = "") -> None:
    """Insert variables before the existing ones, which can refer to them.

    An existing variable of the same name keeps its value.
    """
    for container in pod["spec"]["containers"]:
        if containers and container["name"] != containers:
            continue
        known = container.get("env") or []
        names = {each["name"] for each in known}
        new = [{"name": name, "value": values[name]} for name in values if name not in names]
        container["env"] = new + known


def create(operations: Operations, kind: Kind, owner: Object, pod: Object) -> str:
    """Create the pod. Return the reason of a refusal, or an empty string.

    An event reports the result as well.
    """
    metadata = owner["metadata"]
    try:
        made = operations.create(kinds.PODS, metadata["namespace"], pod)
    except Refused as refused:
        if refused.reason != "AlreadyExists":
            text = f"Error creating: {refused.message}"
            operations.event(kind, owner, "Warning", "FailedCreate", text)
        return refused.message
    message = f"Created pod: {made['metadata']['name']}"
    operations.event(kind, owner, "Normal", "SuccessfulCreate", message)
    return ""


def remove(operations: Operations, pod: Object, finalizer: str = "") -> None:
    """Delete the pod. Remove `finalizer` first, so that the Job does not count the pod."""
    metadata = pod["metadata"]
    if finalizer and finalizer in (metadata.get("finalizers") or []):
        release(operations, pod, finalizer)
    with contextlib.suppress(Refused):
        options = DeleteOptions(policy="Background", uid=metadata["uid"])
        delete(operations, kinds.PODS, metadata["namespace"], metadata["name"], options)


def release(operations: Operations, pod: Object, finalizer: str) -> None:
    def how(thing: Object) -> None:
        kept = [each for each in thing["metadata"].get("finalizers") or [] if each != finalizer]
        thing["metadata"].pop("finalizers", None)
        if kept:
            thing["metadata"]["finalizers"] = kept

    operations.edit(kinds.PODS, pod, how)


def count(pods: list[Object]) -> dict[str, int]:
    """Return the number of active, ready and terminating pods."""
    return {
        "active": sum(map(is_active, pods)),
        "ready": sum(is_active(pod) and is_ready(pod) for pod in pods),
        "terminating": sum(
            is_deleted(pod) and phase(pod) not in ("Succeeded", "Failed") for pod in pods
        ),
    }
