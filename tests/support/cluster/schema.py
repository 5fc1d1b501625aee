"""The known fields of objects, for `fieldValidation=Strict`."""

from __future__ import annotations

from collections.abc import Iterator

from cluster import kinds
from cluster.kinds import Kind
from cluster.refusals import Object, bad_request


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOP = _names("apiVersion kind metadata spec status")
_TOPS = {
    kinds.CONFIGMAPS: _names("apiVersion kind metadata data binaryData immutable"),
    kinds.SECRETS: _names("apiVersion kind metadata data stringData immutable type"),
    kinds.SERVICEACCOUNTS: _names(
        "apiVersion kind metadata secrets imagePullSecrets automountServiceAccountToken"
    ),
    kinds.EVENTS: _names(
        "apiVersion kind metadata involvedObject reason message source firstTimestamp"
        " lastTimestamp count type eventTime series action related reportingComponent"
        " reportingInstance"
    ),
    kinds.ROLES: _names("apiVersion kind metadata rules"),
    kinds.CLUSTERROLES: _names("apiVersion kind metadata rules aggregationRule"),
    kinds.ROLEBINDINGS: _names("apiVersion kind metadata subjects roleRef"),
    kinds.CLUSTERROLEBINDINGS: _names("apiVersion kind metadata subjects roleRef"),
    kinds.PRIORITIES: _names(
        "apiVersion kind metadata value globalDefault description preemptionPolicy"
    ),
}
_METADATA = _names(
    "name generateName namespace labels annotations uid resourceVersion generation"
    " creationTimestamp deletionTimestamp deletionGracePeriodSeconds finalizers ownerReferences"
    " managedFields selfLink"
)
_POD = _names(
    "activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy"
    " enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers"
    " hostname hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead"
    " preemptionPolicy priority priorityClassName readinessGates resourceClaims resources"
    " restartPolicy runtimeClassName schedulerName schedulingGates schedulingGroup securityContext"
    " serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain"
    " terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes workloadRef"
)
_CONTAINER = _names(
    "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports"
    " readinessProbe resizePolicy resources restartPolicy restartPolicyRules securityContext"
    " startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty"
    " volumeDevices volumeMounts workingDir"
)
_JOB = _names(
    "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy"
    " manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy scheduling"
    " selector successPolicy suspend template ttlSecondsAfterFinished"
)


def check(kind: Kind, thing: Object) -> None:
    """Refuse unknown fields.

    Raises Refused: the object has an unknown field (400).
    """
    unknown = list(_unknown(kind, thing))
    if unknown:
        text = ", ".join(f'unknown field "{name}"' for name in unknown)
        raise bad_request(
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}:'
            f" strict decoding error: {text}"
        )


def pod_specs(thing: object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield the path and the spec of each pod in an object of any kind."""
    if isinstance(thing, dict):
        if isinstance(thing.get("containers"), list):
            yield path, thing
            return
        for name, value in thing.items():
            if name not in ("metadata", "status"):
                yield from pod_specs(value, f"{path}.{name}" if path else name)
    elif isinstance(thing, list):
        for place, value in enumerate(thing):
            yield from pod_specs(value, f"{path}[{place}]")


def _unknown(kind: Kind, thing: Object) -> Iterator[str]:
    yield from (name for name in thing if name not in _TOPS.get(kind, _TOP))
    metadata = thing.get("metadata") or {}
    yield from (f"metadata.{name}" for name in metadata if name not in _METADATA)
    if kind is kinds.JOBS:
        yield from (f"spec.{name}" for name in thing.get("spec") or {} if name not in _JOB)
    if kind.plural in ("configmaps", "secrets"):
        return
    for path, spec in pod_specs(thing):
        yield from (f"{path}.{name}" for name in spec if name not in _POD)
        for group in ("containers", "initContainers"):
            for place, container in enumerate(spec.get(group) or []):
                where = f"{path}.{group}[{place}]"
                yield from (f"{where}.{name}" for name in container if name not in _CONTAINER)
