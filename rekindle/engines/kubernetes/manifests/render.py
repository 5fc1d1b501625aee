"""Render all objects of a job: the interface of this package. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.manifests import Manifest, ascend, coordinator
from rekindle.engines.kubernetes.manifests.kinds.base import Adapter, Rendered
from rekindle.engines.kubernetes.manifests.kinds.batch import INDEXED_JOB, JOBSET
from rekindle.engines.kubernetes.manifests.kinds.kubeflow import PYTORCHJOB, TRAINJOB
from rekindle.engines.kubernetes.manifests.kinds.volcano import ASCENDJOB, VOLCANO_JOB
from rekindle.engines.kubernetes.manifests.pod_template import (
    keep_off,
    keep_our_labels,
    pod_template,
)
from rekindle.engines.kubernetes.manifests.settings import (
    IsolationMode,
    KubernetesSettings,
    WorkloadKind,
)
from rekindle.engines.kubernetes.manifests.strategic_merge import merge
from rekindle.engines.kubernetes.manifests.validation import check_pods
from rekindle.errors import UsageError
from rekindle.job.spec import JobSpec, KeepsOff

_ADAPTERS: dict[WorkloadKind, Adapter] = {
    WorkloadKind.INDEXED_JOB: INDEXED_JOB,
    WorkloadKind.JOBSET: JOBSET,
    WorkloadKind.ASCENDJOB: ASCENDJOB,
    WorkloadKind.VOLCANO_JOB: VOLCANO_JOB,
    WorkloadKind.TRAINJOB: TRAINJOB,
    WorkloadKind.PYTORCHJOB: PYTORCHJOB,
}
_VOLCANO = (WorkloadKind.ASCENDJOB, WorkloadKind.VOLCANO_JOB)


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """A job's objects, in the order of their creation.

    `root`: the ConfigMap that owns all others. `around`: the coordinator's objects. `beside`:
    objects that must exist before the workload.
    """

    root: Manifest
    around: tuple[Manifest, ...]
    beside: tuple[Manifest, ...]
    workload: Manifest

    @property
    def every(self) -> tuple[Manifest, ...]:
        """Return all objects."""
        return (self.root, *self.around, *self.beside, self.workload)


def adapter(kind: WorkloadKind) -> Adapter:
    """Return the adapter of this kind of workload."""
    return _ADAPTERS[kind]


def keeps_off(pods: KubernetesSettings) -> KeepsOff:
    """Return how the job's pods avoid isolated hosts.

    If no mark on the host keeps all pods away, the kind's controller must place single pods
    elsewhere.
    """
    marked = pods.isolated_hosts is not IsolationMode.AVOID
    return KeepsOff.AT_ONCE if marked or adapter(pods.kind).follows else KeepsOff.RESTARTS


def render(
    spec: JobSpec,
    pods: KubernetesSettings,
    *,
    secret: str,
    attempt: int = 0,
    avoid: tuple[str, ...] = (),
) -> Manifests:
    """Return all objects of a job.

    secret: the job's. avoid: names of nodes.

    Raises UsageError: the settings of the pods are invalid, or a patch does not fit.
    """
    check_pods(pods, spec)
    pod_spec = msgspec.structs.replace(spec, keeps_off=keeps_off(pods))
    kind = adapter(pods.kind)
    own = labels.labels(spec.job_id, attempt=attempt)
    own[labels.DESCRIBED] = labels.described(secret, spec, pods)
    job_labels = ascend.job_labels(pods.ascend, process_level=pods.process_level)
    job = Rendered(
        spec=spec,
        pods=pods,
        template=pod_template(spec, pods, attempt=attempt, restart=kind.restart(pods)),
        labels=pods.labels | job_labels | _queue(pods) | own,
        annotations=pods.annotations
        | ascend.job_annotations(pods.ascend, pods.recover_strategy)
        | {labels.JOB_ID: spec.job_id},
    )
    workload = _patched(kind.render(job), pods)
    _finish(kind, workload, avoid)
    kind.check(workload)
    beside = kind.beside(job)
    for one in beside:
        kept = {k: v for k, v in one["metadata"]["labels"].items() if k != labels.KUEUE}
        one["metadata"]["labels"] = kept | own
        _finish(kind, one, avoid)
    return Manifests(
        root=coordinator.root(spec, pods, own),
        around=(
            coordinator.secret(pod_spec, pods, secret),
            *coordinator.services(spec, pods),
            *coordinator.policies(spec, pods),
            coordinator.deployment(spec, pods),
        ),
        beside=tuple(beside),
        workload=workload,
    )


def _queue(pods: KubernetesSettings) -> dict[str, str]:
    """Return the label of Kueue, for a kind that Volcano does not place."""
    by_volcano = pods.kind in _VOLCANO or (pods.kind is WorkloadKind.PYTORCHJOB and pods.gang)
    return {labels.KUEUE: pods.queue} if pods.queue and not by_volcano else {}


def _patched(workload: Manifest, pods: KubernetesSettings) -> Manifest:
    """Return the workload with the user's patch. Raises UsageError: the patch does not fit."""
    new = merge(workload, pods.overrides, "overrides")
    for where in (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")):
        if _at(new, where) != _at(workload, where):
            raise UsageError(
                f"overrides: a patch must not change {'.'.join(where)}, because Rekindle uses it "
                "to find the job"
            )
    keep_our_labels(workload, new, "overrides")
    return new


def _at(manifest: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        manifest = manifest.get(key) if isinstance(manifest, dict) else None
    return manifest


def _finish(kind: Adapter, manifest: Manifest, avoid: tuple[str, ...]) -> None:
    """Make the pods avoid these nodes. Raises UsageError: a patch has removed the pods."""
    try:
        for holder in kind.templates(manifest):
            holder["template"] = keep_off(holder["template"], avoid)
            if not holder["template"]["spec"]["containers"]:
                raise KeyError("containers")
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"overrides: the patches leave the {manifest['kind']} without a pod template ({error})"
        ) from error
