"""The default values that the server sets in objects."""

from __future__ import annotations

from typing import Any

from cluster import kinds
from cluster.kinds import Kind
from cluster.refusals import Object

_AWAY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def fill(kind: Kind, thing: Object) -> None:
    """Set the defaults of a new or changed object."""
    if kind is kinds.PODS:
        _pod(thing)
    elif kind is kinds.JOBS:
        _job(thing)
    elif kind in (kinds.DEPLOYMENTS, kinds.REPLICASETS):
        thing["spec"].setdefault("replicas", 1)
        pod_spec(thing["spec"]["template"].setdefault("spec", {}))
    elif kind is kinds.SERVICES:
        _service(thing["spec"])
    elif kind is kinds.NAMESPACES:
        thing.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
        thing.setdefault("status", {"phase": "Active"})
        thing["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = thing[
            "metadata"
        ]["name"]
    elif kind is kinds.SECRETS:
        _secret(thing)
    elif kind is kinds.NODES:
        thing.setdefault("spec", {})
    elif kind is kinds.JOBSETS:
        _jobset(thing["spec"])
    elif kind is kinds.CLAIMS:
        thing.setdefault("status", {"phase": "Bound"})


def pod_spec(spec: Object) -> None:
    """Set the defaults of the spec of a pod or of a pod template."""
    _set(
        spec,
        restartPolicy="Always",
        dnsPolicy="ClusterFirst",
        schedulerName="default-scheduler",
        terminationGracePeriodSeconds=30,
        securityContext={},
    )
    for container in (spec.get("containers") or []) + (spec.get("initContainers") or []):
        _set(
            container,
            imagePullPolicy="IfNotPresent",
            terminationMessagePath="/dev/termination-log",
            terminationMessagePolicy="File",
            resources={},
        )
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")
        for variable in container.get("env") or []:
            if "fieldRef" in (variable.get("valueFrom") or {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
        _probe(container.get("readinessProbe"))


def _pod(thing: Object) -> None:
    spec = thing.setdefault("spec", {})
    pod_spec(spec)
    _set(spec, serviceAccountName="default", enableServiceLinks=True, priority=0)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    tolerations = spec.setdefault("tolerations", [])
    for key in _AWAY:
        tolerated = (each.get("key") in (key, None, "") for each in tolerations)
        effects = (each.get("effect") in ("NoExecute", None, "") for each in tolerations)
        if not any(map(all, zip(tolerated, effects, strict=True))):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )
    for container in spec.get("containers") or []:
        resources = container["resources"]
        for name, value in (resources.get("limits") or {}).items():
            resources.setdefault("requests", {}).setdefault(name, value)
    thing.setdefault("status", {}).setdefault("phase", "Pending")
    thing["status"].setdefault("qosClass", "BestEffort")


def _job(thing: Object) -> None:
    spec, metadata = thing["spec"], thing["metadata"]
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = 1
    _set(spec, parallelism=1, completionMode="NonIndexed", suspend=False, manualSelector=False)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("podReplacementPolicy", "TerminatingOrFailed")
    thing.setdefault("status", {})
    template = spec.setdefault("template", {})
    pod_spec(template.setdefault("spec", {}))
    uid = metadata.get("uid")
    if not uid or spec["manualSelector"]:
        return
    name = metadata["name"]
    for labels in (template.setdefault("metadata", {}).setdefault("labels", {}),):
        labels["batch.kubernetes.io/controller-uid"] = uid
        labels["batch.kubernetes.io/job-name"] = name
        labels["controller-uid"] = uid
        labels["job-name"] = name
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}


def _service(spec: Object) -> None:
    _set(spec, type="ClusterIP", sessionAffinity="None", clusterIP="10.96.0.10")
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))


def _secret(thing: Object) -> None:
    import base64

    thing.setdefault("type", "Opaque")
    for name, value in (thing.pop("stringData", None) or {}).items():
        thing.setdefault("data", {})[name] = base64.b64encode(value.encode()).decode()


def _jobset(spec: Object) -> None:
    _set(spec, suspend=False, successPolicy={"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    _set(network, enableDNSHostnames=True, publishNotReadyAddresses=True)
    for each in spec.get("replicatedJobs") or []:
        _set(each, replicas=1, groupName="default")
        template = each["template"].setdefault("spec", {})
        template.setdefault("completionMode", "Indexed")
        inner = template.setdefault("template", {}).setdefault("spec", {})
        inner.setdefault("restartPolicy", "OnFailure")


def _probe(probe: Object | None) -> None:
    if probe:
        _set(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)


def _set(where: Object, **values: Any) -> None:
    for name, value in values.items():
        where.setdefault(name, value)
