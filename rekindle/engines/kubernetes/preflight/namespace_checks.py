"""Checks in a namespace: the objects that a pod names exist, and the pod could ever fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rekindle.engines.kubernetes.client.api import Api
from rekindle.engines.kubernetes.client.errors import ForbiddenError, MissingObjectError
from rekindle.engines.kubernetes.client.objects import collection
from rekindle.engines.kubernetes.manifests.quantities import amount
from rekindle.engines.kubernetes.manifests.render import Manifests
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.engines.kubernetes.preflight.findings import PreflightFinding, missing, ok, unknown
from rekindle.engines.kubernetes.preflight.resource_requests import (
    Demand,
    asked,
    breaches,
    demands,
    over,
    told,
    total,
    unsaid,
    with_defaults,
)

Manifest = dict[str, Any]


class Mention(msgspec.Struct, frozen=True):
    """An object that a pod names. api_version, plural: where it is looked for."""

    kind: str
    name: str
    api_version: str
    plural: str
    everywhere: bool = False  # it is none of a namespace


def mentions(spec: Manifest) -> Iterator[Mention]:
    """Yield what a pod's spec names and does not call optional; one may come twice."""
    if name := spec.get("serviceAccountName"):
        yield Mention("ServiceAccount", name, "v1", "serviceaccounts")
    if name := spec.get("priorityClassName"):
        yield Mention("PriorityClass", name, "scheduling.k8s.io/v1", "priorityclasses", True)
    if name := spec.get("runtimeClassName"):
        yield Mention("RuntimeClass", name, "node.k8s.io/v1", "runtimeclasses", True)
    for each in spec.get("imagePullSecrets") or ():
        yield from _secret(each)
    for volume in spec.get("volumes") or ():
        if name := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield Mention("PersistentVolumeClaim", name, "v1", "persistentvolumeclaims")
        found = volume.get("secret") or {}
        yield from _secret(found | {"name": found.get("secretName")})
        yield from _config_map(volume.get("configMap"))
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for source in container.get("envFrom") or ():
            yield from _secret(source.get("secretRef"))
            yield from _config_map(source.get("configMapRef"))
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _secret(source.get("secretKeyRef"))
            yield from _config_map(source.get("configMapKeyRef"))


def _secret(where: Manifest | None) -> Iterator[Mention]:
    if where and where.get("name") and not where.get("optional"):
        yield Mention("Secret", where["name"], "v1", "secrets")


def _config_map(where: Manifest | None) -> Iterator[Mention]:
    if where and where.get("name") and not where.get("optional"):
        yield Mention("ConfigMap", where["name"], "v1", "configmaps")


_MAKE = {
    "ServiceAccount": "kubectl create serviceaccount {0} -n {1}",
    "PersistentVolumeClaim": "make the claim, with the storage that is to be kept",
    "PriorityClass": "have an administrator make it, or name another one",
    "RuntimeClass": "have an administrator make it, or name another one",
}


def mentioned(
    api: Api, kind: WorkloadKind, wanted: Manifests, namespace: str
) -> Iterator[PreflightFinding]:
    """Look for everything that the pods name and the job does not bring along."""
    own = {(one["kind"], one["metadata"]["name"]) for one in wanted.every}
    named = (each for demand in demands(kind, wanted) for each in mentions(demand.spec))
    for each in dict.fromkeys(named):
        if (each.kind, each.name) not in own:
            yield _look_for(api, each, namespace)


def _look_for(api: Api, each: Mention, namespace: str) -> PreflightFinding:
    what = f"{each.kind} {each.name}"
    path = collection(each.api_version, each.plural, "" if each.everywhere else namespace)
    try:
        api.get(f"{path}/{each.name}")
    except MissingObjectError:
        do = _MAKE.get(each.kind, "make it, or name another one").format(each.name, namespace)
        where = "" if each.everywhere else f" in namespace {namespace}"
        return missing(what, f"the pods name it, and it is not there{where}", do)
    except ForbiddenError:
        return unknown(what, "the pods name it; whether it is there may not be looked at")
    return ok(what)


def quotas(
    api: Api, kind: WorkloadKind, wanted: Manifests, namespace: str
) -> Iterator[PreflightFinding]:
    """Hold the job against the ResourceQuotas and LimitRanges of the namespace."""
    ranges = _listed(api, "limitranges", namespace)
    pods = demands(kind, wanted)
    if ranges is None:
        yield unknown("LimitRanges", "may not be looked at")
    else:
        pods = [Demand(with_defaults(each.spec, ranges), each.count) for each in pods]
        broken = dict.fromkeys(b for each in pods for b in breaches(each.spec, ranges))
        for said in broken:
            yield missing("LimitRange", said, "ask for what is allowed")
        if ranges and not broken:
            yield ok("LimitRanges", "the pods are within them")
    found = _listed(api, "resourcequotas", namespace)
    if found is None:
        yield unknown("ResourceQuotas", "may not be looked at")
    for each in found or ():
        yield _judged(each, pods, wanted)


def _judged(quota: Manifest, pods: Sequence[Demand], wanted: Manifests) -> PreflightFinding:
    name, spec = quota["metadata"]["name"], quota.get("spec") or {}
    what, hard = f"ResourceQuota {name}", spec.get("hard") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return unknown(what, "it is for certain pods only, and was not judged")
    whole = total(pods, wanted.every)
    if never := over(whole, hard, {}):
        do = "make the job smaller, or have the quota raised"
        return missing(what, f"the job can never fit: {'; '.join(never.values())}", do)
    if silent := unsaid(pods, hard):
        said = f"it wants every container to say {', '.join(silent)}"
        do = "give cpu and memory, also below coordinator, or have a LimitRange give defaults"
        return missing(what, said, do)
    if now := over(whole, hard, (quota.get("status") or {}).get("used") or {}):
        return unknown(what, f"the job waits until others have gone: {'; '.join(now.values())}")
    return ok(what, "the job fits")


def devices(api: Api, kind: WorkloadKind, wanted: Manifests) -> Iterator[PreflightFinding]:
    """Look for nodes with enough of each device; whoever may not list nodes cannot tell."""
    most: dict[str, Any] = {}
    for each in demands(kind, wanted):
        for name, value in asked(each.spec, "requests").items():
            if "/" in name:
                most[name] = max(most.get(name, value), value)
    if not most:
        return
    nodes = _listed(api, "nodes", "")
    for name, value in most.items():
        what = f"device {name}"
        if nodes is None:
            yield unknown(what, "nodes may not be looked at")
            continue
        given = ((node.get("status") or {}).get("allocatable") or {} for node in nodes)
        enough = sum(amount(each.get(name, "0")) >= value for each in given)
        if enough:
            yield ok(what, f"{enough} of {len(nodes)} nodes have {told(value)} or more")
        else:
            do = "install its device plugin, or correct device and devices_per_node"
            yield missing(what, f"none of {len(nodes)} nodes has {told(value)}", do)


def _listed(api: Api, plural: str, namespace: str) -> list[Manifest] | None:
    """List objects; None: that is not allowed."""
    try:
        return list(api.get(collection("v1", plural, namespace)).get("items") or ())
    except ForbiddenError:
        return None
