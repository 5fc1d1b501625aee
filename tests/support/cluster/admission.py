"""What is looked up before a pod is let in."""

from __future__ import annotations

from cluster import kinds
from cluster.kinds import Kind
from cluster.refusals import Object, forbidden
from cluster.store import Store


def check_namespace(store: Store, kind: Kind, thing: Object) -> None:
    """Nothing new comes into one that is being deleted."""
    namespace = thing["metadata"].get("namespace", "")
    found = store.look(kinds.NAMESPACES, "", namespace) if kind.namespaced else None
    if found is not None and "deletionTimestamp" in found["metadata"]:
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        raise forbidden(kind, thing["metadata"].get("name", ""), why)


def check(store: Store, pod: Object) -> None:
    """Its account and its priority."""
    metadata, spec = pod["metadata"], pod["spec"]
    account = spec["serviceAccountName"]
    if store.look(kinds.SERVICEACCOUNTS, metadata["namespace"], account) is None:
        place = f"{metadata['namespace']}/{account}"
        why = f'error looking up service account {place}: serviceaccount "{account}" not found'
        raise forbidden(kinds.PODS, metadata["name"], why)
    if name := spec.get("priorityClassName"):
        found = store.look(kinds.PRIORITIES, "", name)
        if found is None:
            why = f"no PriorityClass with name {name} was found"
            raise forbidden(kinds.PODS, metadata["name"], why)
        spec["priority"] = found["value"]
