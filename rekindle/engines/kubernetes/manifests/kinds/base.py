"""Describe a kind of workload: its manifest, its abilities, and the reader of its state."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rekindle.engines.kubernetes.labels import Names
from rekindle.engines.kubernetes.manifests import Manifest
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, replicas
from rekindle.job.spec import JobSpec

FOREVER = 2**31 - 1  # a practically infinite limit of retries: the coordinator decides when to stop


class WorkloadPhase(str, enum.Enum):
    """The phase of a workload, independent of its kind."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Observed(msgspec.Struct, frozen=True):
    """The state of a workload, from its object."""

    phase: WorkloadPhase
    reason: str = ""
    message: str = ""


class Gvk(msgspec.Struct, frozen=True):
    """The name of a kind in the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """Return the group and the version, in the format of manifests."""
        return f"{self.group}/{self.version}"


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a job's workload. `template` is its pods' template, rendered for the kind."""

    spec: JobSpec
    pods: KubernetesSettings
    template: Manifest
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        """Return the name of the workload."""
        return Names.of(self.spec.job_id).workload

    @property
    def replicas(self) -> int:
        """Return the number of its pods."""
        return replicas(self.spec)

    @property
    def least(self) -> int:
        """Return the smallest number of pods with which the job can begin."""
        return self.spec.least_nodes


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload. Its functions are pure: they map manifests to manifests and values."""

    gvk: Gvk
    pods_label: str  # the label of its pods that has the workload's name
    # The spec of the workload, and labels of the workload in addition to the job's.
    spec: Callable[[Rendered], Manifest]
    labels: Callable[[KubernetesSettings], dict[str, str]] = lambda pods: {}
    # The objects that must exist before the workload.
    beside: Callable[[Rendered], list[Manifest]] = lambda job: []
    # The kind of the object that has the pod templates ("": the workload), and the maps in its spec
    # that have a template as `template`.
    templates_in: str = ""
    holders: Callable[[Manifest], list[Manifest]]
    # The restartPolicy of the pods. "": it is next to the templates.
    restart: Callable[[KubernetesSettings], str] = lambda pods: "Never"
    # Raises UsageError if the kind's controller would refuse the workload, because of a wrong
    # patch. By default the API server or the webhook of the controller checks that.
    check: Callable[[Manifest], None] = lambda workload: None
    # The state of a live workload.
    status: Callable[[Manifest], Observed]
    # The part of a spec that suspends or resumes the workload. None: the kind has no suspension.
    suspend: Callable[[bool], Manifest] | None = None
    # The part of a spec that gives later pods the templates of this spec. None: they cannot change.
    next_templates: Callable[[Manifest], Manifest] | None = None
    # Templates may change while pods run, and not only while the workload is suspended.
    follows: bool = False

    def render(self, job: Rendered) -> Manifest:
        """Return the workload."""
        found = workload(self.gvk, job, self.spec(job))
        found["metadata"]["labels"] = job.labels | self.labels(job.pods)
        return found

    def templates(self, manifest: Manifest) -> list[Manifest]:
        """Return the maps in a manifest that have a pod template as `template`."""
        wanted = self.templates_in or self.gvk.kind
        return self.holders(manifest["spec"]) if manifest["kind"] == wanted else []

    def suspend_patch(self) -> Manifest | None:
        """Return the merge patch (RFC 7396) that ends all pods.

        The result is None if the kind has no suspension.
        """
        return {"spec": self.suspend(True)} if self.suspend else None

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest | None:
        """Return the merge patch that resumes a suspended workload with the templates of a new one.

        workload: the manifest of the next attempt. avoid: the nodes that it must avoid. None: the
        next attempt needs a new workload.
        """
        if self.suspend is None or (avoid and self.next_templates is None):
            return None
        return {"spec": self.suspend(False) | self.avoid_patch(workload)["spec"]}

    def avoid_patch(self, workload: Manifest) -> Manifest:
        """Return the merge patch that makes later pods avoid the same nodes as this workload."""
        return {"spec": self.next_templates(workload["spec"]) if self.next_templates else {}}


def workload(gvk: Gvk, job: Rendered, spec: Manifest) -> Manifest:
    """Return a manifest with its fields in the usual order."""
    return {
        "apiVersion": gvk.api_version,
        "kind": gvk.kind,
        "metadata": {
            "name": job.name,
            "namespace": job.pods.namespace,
            "labels": job.labels,
            "annotations": job.annotations,
        },
        "spec": spec,
    }


def conditions(obj: Mapping[str, Any]) -> list[Manifest]:
    """Return the true conditions of a live object, in their order."""
    every = (obj.get("status") or {}).get("conditions") or []
    return [one for one in every if one.get("status") == "True"]


def observed(phase: WorkloadPhase, condition: Mapping[str, Any]) -> Observed:
    """Return a phase with the reason and message of a condition."""
    return Observed(
        phase, condition.get("reason") or condition["type"], condition.get("message") or ""
    )


_PHASES = {  # by condition, in this order
    "Failed": WorkloadPhase.FAILED,
    "Complete": WorkloadPhase.SUCCEEDED,
    "Completed": WorkloadPhase.SUCCEEDED,
    "Suspended": WorkloadPhase.SUSPENDED,
    # Before an end: some pods still have to end.
    "FailureTarget": WorkloadPhase.RUNNING,
    "SuccessCriteriaMet": WorkloadPhase.RUNNING,
}


def by_conditions(obj: Mapping[str, Any], working: bool) -> Observed:
    """Return the state of a kind whose conditions are those of batch/v1 Job.

    working: some of its pods run.
    """
    held = {one["type"]: one for one in conditions(obj)}
    for name, phase in _PHASES.items():
        if name in held:
            return observed(phase, held[name])
    if (obj.get("spec") or {}).get("suspend"):
        return Observed(WorkloadPhase.SUSPENDED)
    return Observed(WorkloadPhase.RUNNING if working else WorkloadPhase.PENDING)


def next_attempt(template: Manifest) -> Manifest:
    """Return the part of a merge patch with the labels and affinity of this template."""
    affinity = (template["spec"].get("affinity") or {}).get("nodeAffinity")
    return {
        "metadata": {"labels": template["metadata"]["labels"]},
        "spec": {"affinity": {"nodeAffinity": affinity}},
    }
