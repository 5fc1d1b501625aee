"""The admission checks of pods and namespaces, with the messages of a real server."""

from __future__ import annotations

from collections.abc import Iterator

from cluster import kinds
from cluster.kinds import Kind
from cluster.quantities import amount, requests
from cluster.refusals import Object, forbidden
from cluster.store import Store


def check_namespace(store: Store, kind: Kind, thing: Object) -> None:
    """Refuse a new object in a namespace that is being deleted.

    Raises Refused: the namespace has a deletion timestamp (403).
    """
    namespace = thing["metadata"].get("namespace", "")
    found = store.look(kinds.NAMESPACES, "", namespace) if kind.namespaced else None
    if found is not None and "deletionTimestamp" in found["metadata"]:
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        raise forbidden(kind, thing["metadata"].get("name", ""), why)


def check(store: Store, pod: Object) -> None:
    """Check the account, the priority class, the LimitRanges and the ResourceQuotas of a pod.

    Sets the priority of the pod.

    Raises Refused: a check fails (403).
    """
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
    for refused in (*_over_limits(store, pod), *_over_quotas(store, pod)):
        raise forbidden(kinds.PODS, metadata["name"], refused)


def _over_limits(store: Store, pod: Object) -> Iterator[str]:
    """Yield the violations of LimitRanges. This server supports only `max` of containers."""
    for each in store.all(kinds.LIMITS, pod["metadata"]["namespace"]):
        for rule in each["spec"]["limits"]:
            limits = (rule.get("max") or {}) if rule["type"] == "Container" else {}
            for container in pod["spec"]["containers"]:
                given = (container.get("resources") or {}).get("limits") or {}
                for name in sorted(set(limits) & set(given)):
                    if amount(given[name]) > amount(limits[name]):
                        most = f"maximum {name} usage per Container is {limits[name]}"
                        yield f"{most}, but limit is {given[name]}"


def _over_quotas(store: Store, pod: Object) -> Iterator[str]:
    """Yield the violations of ResourceQuotas. This server does not support scopes."""
    namespace = pod["metadata"]["namespace"]
    there = [each for each in store.all(kinds.PODS, namespace) if _counts(each)]
    for quota in store.all(kinds.QUOTAS, namespace):
        name, hard = quota["metadata"]["name"], quota["spec"].get("hard") or {}
        if unsaid := [
            f"{each} for: {who}" for each in sorted(hard) if (who := _lacking(pod, each))
        ]:
            yield f"failed quota: {name}: must specify {'; '.join(unsaid)}"
            continue
        wanted = {each: _use(pod, each) for each in sorted(hard)}
        used = {each: sum(_use(other, each) for other in there) for each in hard}
        over = [n for n, value in wanted.items() if value and value + used[n] > amount(hard[n])]
        if over:
            parts = {"requested": wanted, "used": used, "limited": hard}
            listed = (
                f"{part}: {','.join(f'{each}={values[each]}' for each in over)}"
                for part, values in parts.items()
            )
            yield f"exceeded quota: {name}, {', '.join(listed)}"


def _counts(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _use(pod: Object, resource: str) -> int | float:
    """Return the amount of a quota's resource that a pod uses."""
    which, _, name = resource.partition(".")
    if which in ("pods", "count/pods"):
        return 1
    if which == "limits":
        given = [_resources(each, "limits") for each in pod["spec"]["containers"]]
        return sum(amount(each.get(name, 0)) for each in given)
    return requests(pod["spec"]).get(name if which == "requests" else resource, 0.0)


def _lacking(pod: Object, resource: str) -> str:
    """Return the names of the containers without a value that a quota on cpu or memory requires."""
    which, _, name = resource.rpartition(".")
    if which not in ("", "requests", "limits") or name not in ("cpu", "memory"):
        return ""
    containers = pod["spec"]["containers"]
    kind = which or "requests"
    return ",".join(each["name"] for each in containers if name not in _resources(each, kind))


def _resources(container: Object, which: str) -> Object:
    """Return the limits of a container, or its requests. A limit is the default of a request."""
    resources = container.get("resources") or {}
    limits: Object = resources.get("limits") or {}
    return limits if which == "limits" else {**limits, **(resources.get("requests") or {})}
