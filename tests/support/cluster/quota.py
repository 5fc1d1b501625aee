"""Resource quotas: how many pods there may be, and what they may ask for."""

from __future__ import annotations

from cluster import kinds
from cluster.quantities import amount, requests, told
from cluster.refusals import Object, forbidden
from cluster.store import Store

_DONE = ("Succeeded", "Failed")


def check(store: Store, pod: Object) -> None:
    """Refuse a pod that no quota of its namespace has room for."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    asked = _usage([pod])
    for quota in store.all(kinds.QUOTAS, namespace):
        hard = (quota.get("spec") or {}).get("hard") or {}
        used = _usage([each for each in store.all(kinds.PODS, namespace) if not _is_done(each)])
        title = quota["metadata"]["name"]
        missing = [resource for resource in hard if _is_request(resource) and resource not in asked]
        if missing and any(
            resource in ("cpu", "memory", "requests.cpu", "requests.memory") for resource in missing
        ):
            containers = ",".join(each["name"] for each in pod["spec"]["containers"])
            lacking = ",".join(f"{resource} for: {containers}" for resource in sorted(missing))
            raise forbidden(kinds.PODS, name, f"failed quota: {title}: must specify {lacking}")
        over = [
            resource
            for resource, limit in sorted(hard.items())
            if asked.get(resource, 0.0) > 0
            and used.get(resource, 0.0) + asked[resource] > amount(limit)
        ]
        if over:
            lists = [
                ",".join(
                    f"{resource}={_told(resource, values.get(resource, 0.0))}" for resource in over
                )
                for values in (asked, used, {key: amount(value) for key, value in hard.items()})
            ]
            why = f"exceeded quota: {title}, requested: {lists[0]}, used: {lists[1]}"
            why += f", limited: {lists[2]}"
            raise forbidden(kinds.PODS, name, why)


def status(store: Store, quota: Object) -> Object:
    """What of it is used."""
    hard = (quota.get("spec") or {}).get("hard") or {}
    pods = [
        each for each in store.all(kinds.PODS, quota["metadata"]["namespace"]) if not _is_done(each)
    ]
    used = _usage(pods)
    return {"hard": hard, "used": {name: told(used.get(name, 0.0)) for name in hard}}


def _usage(pods: list[Object]) -> dict[str, float]:
    total: dict[str, float] = {"pods": 0.0, "count/pods": 0.0}
    for pod in pods:
        total["pods"] += 1
        total["count/pods"] += 1
        for name, value in requests(pod["spec"]).items():
            total[f"requests.{name}"] = total.get(f"requests.{name}", 0.0) + value
            if name in ("cpu", "memory"):
                total[name] = total.get(name, 0.0) + value
    return total


def _is_done(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in _DONE


def _is_request(resource: str) -> bool:
    return resource in ("cpu", "memory") or resource.startswith("requests.")


def _told(resource: str, value: float) -> str:
    if resource.endswith("memory") and value % 2**20 == 0 and value:
        return f"{int(value // 2**20)}Mi"
    return told(value)
