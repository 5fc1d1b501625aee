"""Check that the objects and devices exist that a job's pods name; the findings of all checks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from decimal import Decimal

import msgspec

from rekindle.engines.kubernetes.client.api import Api
from rekindle.engines.kubernetes.client.api_errors import ForbiddenError, MissingObjectError
from rekindle.engines.kubernetes.client.objects import collection
from rekindle.engines.kubernetes.manifests import Manifest
from rekindle.engines.kubernetes.manifests.quantities import amount
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind

# Fields of a pod's spec, and the objects that they name.
_FIELDS = {
    "serviceAccountName": ("ServiceAccount", "v1", "serviceaccounts", False),
    "priorityClassName": ("PriorityClass", "scheduling.k8s.io/v1", "priorityclasses", True),
    "runtimeClassName": ("RuntimeClass", "node.k8s.io/v1", "runtimeclasses", True),
}
# How to make an object that is missing.
_MAKE = {
    "ServiceAccount": "kubectl create serviceaccount {0} -n {1}",
    "PersistentVolumeClaim": "create the claim, with persistent storage",
    "PriorityClass": "ask an administrator to create it, or name another one",
    "RuntimeClass": "ask an administrator to create it, or name another one",
}


class FindingState(str, enum.Enum):
    """The result of a check."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"  # no answer, or it depends on other users


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of a job.

    `what`: a short name. `result`: the result. `do`: the correction. `optional`: a job runs without
    it.
    """

    what: str
    state: FindingState
    result: str = ""
    do: str = ""
    optional: bool = False

    def in_words(self) -> str:
        """Return a sentence with the result and the correction."""
        return f"{self.what}: {self.result}" + (f" ({self.do})" if self.do else "")


def ok(what: str, result: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that a requirement is met."""
    return PreflightFinding(what=what, state=FindingState.OK, result=result, optional=optional)


def missing(what: str, result: str, do: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that a requirement is not met."""
    return PreflightFinding(
        what=what, state=FindingState.MISSING, result=result, do=do, optional=optional
    )


def unknown(what: str, result: str, do: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that the result is unknown."""
    return PreflightFinding(
        what=what, state=FindingState.UNKNOWN, result=result, do=do, optional=optional
    )


def lacking(found: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """Return the findings that prevent a job."""
    return [one for one in found if one.state is FindingState.MISSING and not one.optional]


def pod_templates(kind: WorkloadKind, wanted: Manifests) -> list[Manifest]:
    """Return the templates of a job's pods: of its nodes and spares, then of its coordinator.

    A leader's template is absent if it equals the workers'.
    """
    holders = [
        each for one in (*wanted.beside, wanted.workload) for each in adapter(kind).templates(one)
    ]
    holders += [one["spec"] for one in wanted.around if one["kind"] == "Deployment"]
    found: list[Manifest] = []
    for holder in holders:
        if holder["template"] not in found:
            found.append(holder["template"])
    return found


class Mention(msgspec.Struct, frozen=True):
    """An object that a pod names. api_version, plural: of its collection."""

    kind: str
    name: str
    api_version: str
    plural: str
    everywhere: bool = False  # it does not belong to a namespace


def mentions(spec: Manifest) -> Iterator[Mention]:
    """Yield the objects that a pod's spec names as required; an object may repeat."""
    for field, (kind, version, plural, everywhere) in _FIELDS.items():
        if name := spec.get(field):
            yield Mention(kind, name, version, plural, everywhere)
    for each in spec.get("imagePullSecrets") or ():
        yield from _needed("Secret", each)
    for volume in spec.get("volumes") or ():
        if name := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield Mention("PersistentVolumeClaim", name, "v1", "persistentvolumeclaims")
        found = volume.get("secret") or {}
        yield from _needed("Secret", found | {"name": found.get("secretName")})
        yield from _needed("ConfigMap", volume.get("configMap"))
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for source in container.get("envFrom") or ():
            yield from _needed("Secret", source.get("secretRef"))
            yield from _needed("ConfigMap", source.get("configMapRef"))
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _needed("Secret", source.get("secretKeyRef"))
            yield from _needed("ConfigMap", source.get("configMapKeyRef"))


def _needed(kind: str, where: Manifest | None) -> Iterator[Mention]:
    if where and where.get("name") and not where.get("optional"):
        yield Mention(kind, where["name"], "v1", f"{kind.lower()}s")


def mentioned(
    api: Api, kind: WorkloadKind, wanted: Manifests, namespace: str
) -> Iterator[PreflightFinding]:
    """Look for all objects that the pods name and the job does not create."""
    own = {(one["kind"], one["metadata"]["name"]) for one in wanted.every}
    named = (each for pod in pod_templates(kind, wanted) for each in mentions(pod["spec"]))
    for each in dict.fromkeys(named):
        if (each.kind, each.name) not in own:
            yield _look_for(api, each, namespace)


def _look_for(api: Api, each: Mention, namespace: str) -> PreflightFinding:
    what = f"{each.kind} {each.name}"
    path = collection(each.api_version, each.plural, "" if each.everywhere else namespace)
    try:
        api.get(f"{path}/{each.name}")
    except MissingObjectError:
        do = _MAKE.get(each.kind, "create it, or name another one").format(each.name, namespace)
        where = "" if each.everywhere else f" in namespace {namespace}"
        return missing(what, f"the pods use it, but it does not exist{where}", do)
    except ForbiddenError:
        return unknown(
            what, "the pods use it, but Rekindle has no right to check whether it exists"
        )
    return ok(what)


def devices(api: Api, kind: WorkloadKind, wanted: Manifests) -> Iterator[PreflightFinding]:
    """Look for nodes that have enough devices for one pod."""
    most: dict[str, Decimal] = {}
    for each in pod_templates(kind, wanted):
        for name, value in _devices_of(each["spec"]).items():
            most[name] = max(most.get(name, value), value)
    if not most:
        return
    try:
        nodes = api.get(collection("v1", "nodes", "")).get("items") or ()
    except ForbiddenError:
        nodes = None
    for name, value in most.items():
        what = f"device {name}"
        if nodes is None:
            yield unknown(what, "Rekindle has no right to list nodes")
            continue
        given = ((node.get("status") or {}).get("allocatable") or {} for node in nodes)
        enough = sum(amount(each.get(name, "0")) >= value for each in given)
        if enough:
            yield ok(what, f"{enough} of {len(nodes)} nodes have {value:f} or more")
        else:
            do = "install its device plugin, or correct device and devices_per_node"
            yield missing(what, f"none of {len(nodes)} nodes has {value:f}", do)


def _devices_of(spec: Manifest) -> dict[str, Decimal]:
    """Return the extended resources of one pod. The API server requires each of them as a limit."""
    found: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, value in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in name:
                found[name] = found.get(name, Decimal()) + amount(value)
    return found
