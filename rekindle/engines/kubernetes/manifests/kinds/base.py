"""A kind of workload as a row: its manifest, its abilities, and how to read its state."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rekindle.engines.kubernetes.labels import Names
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, replicas
from rekindle.job.spec import JobSpec

Manifest = dict[str, Any]

FOREVER = 2**31 - 1  # a limit of retries that is none: the coordinator decides when to give up


class WorkloadPhase(str, enum.Enum):
    """Where a workload is, whatever its kind calls it."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Observed(msgspec.Struct, frozen=True):
    """What a workload says of itself."""

    phase: WorkloadPhase
    reason: str = ""
    message: str = ""


class Gvk(msgspec.Struct, frozen=True):
    """What a kind is called in the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """The group and the version, as manifests have them."""
        return f"{self.group}/{self.version}"


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's workload is made of; `template` is that of its pods, rendered for the kind."""

    spec: JobSpec
    pods: KubernetesSettings
    template: Manifest
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        """What the workload is called."""
        return Names.of(self.spec.job_id).workload

    @property
    def replicas(self) -> int:
        """How many pods it has."""
        return replicas(self.spec)

    @property
    def least(self) -> int:
        """How many of them the job cannot begin without."""
        return self.spec.least_nodes


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload. All of it is pure: manifests in, manifests and values out."""

    gvk: Gvk
    pods_label: str  # the label of its pods that has the workload's name
    # The spec of the workload, and labels of the workload besides the job's.
    spec: Callable[[Rendered], Manifest]
    labels: Callable[[KubernetesSettings], dict[str, str]] = lambda pods: {}
    # The objects that have to be there before the workload.
    beside: Callable[[Rendered], list[Manifest]] = lambda job: []
    # The kind of the object that has the pod templates ("": the workload), and the maps in its spec
    # that have one by the key `template`.
    templates_in: str = ""
    holders: Callable[[Manifest], list[Manifest]]
    # The restartPolicy of the pods. "": it stands beside the templates.
    restart: Callable[[KubernetesSettings], str] = lambda pods: "Never"
    # Raises UsageError if its controller would refuse the workload: a patch may be wrong. By
    # default the API server, or the webhook of the kind's controller, checks it.
    check: Callable[[Manifest], None] = lambda workload: None
    # The state of a live workload.
    status: Callable[[Manifest], Observed]
    # The part of a spec that suspends the workload, or resumes it. None: it cannot be suspended.
    suspend: Callable[[bool], Manifest] | None = None
    # The part of a spec that gives later pods the templates of this spec. None: they cannot change.
    next_templates: Callable[[Manifest], Manifest] | None = None
    # Whether templates may change while pods run, and not only while the workload is suspended.
    follows: bool = False

    def render(self, job: Rendered) -> Manifest:
        """Return the workload."""
        found = workload(self.gvk, job, self.spec(job))
        found["metadata"]["labels"] = job.labels | self.labels(job.pods)
        return found

    def templates(self, manifest: Manifest) -> list[Manifest]:
        """Return the maps in a manifest that have a pod template, by the key `template`."""
        wanted = self.templates_in or self.gvk.kind
        return self.holders(manifest["spec"]) if manifest["kind"] == wanted else []

    def suspend_patch(self) -> Manifest | None:
        """Return the merge patch (RFC 7396) that ends all pods. None: it cannot be suspended."""
        return {"spec": self.suspend(True)} if self.suspend else None

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest | None:
        """Return the merge patch that resumes a suspended workload, with the templates of this one.

        workload: the manifest of the next attempt, which is to avoid these nodes.
        None: the next attempt needs another workload.
        """
        if self.suspend is None or (avoid and self.next_templates is None):
            return None
        return {"spec": self.suspend(False) | self.avoid_patch(workload)["spec"]}

    def avoid_patch(self, workload: Manifest) -> Manifest:
        """Return the merge patch by which later pods keep off the nodes that this one avoids."""
        return {"spec": self.next_templates(workload["spec"]) if self.next_templates else {}}

    def pods_selector(self, name: str) -> str:
        """Return the label selector of the pods of the workload of this name."""
        return f"{self.pods_label}={name}"


def workload(gvk: Gvk, job: Rendered, spec: Manifest) -> Manifest:
    """Return a manifest in the order in which people read it."""
    metadata: Manifest = {
        "name": job.name,
        "namespace": job.pods.namespace,
        "labels": job.labels,
    }
    if job.annotations:
        metadata["annotations"] = job.annotations
    return {
        "apiVersion": gvk.api_version,
        "kind": gvk.kind,
        "metadata": metadata,
        "spec": spec,
    }


def conditions(obj: Mapping[str, Any]) -> list[Manifest]:
    """Return the conditions of a live object that hold, in their order."""
    every = (obj.get("status") or {}).get("conditions") or []
    return [one for one in every if one.get("status") == "True"]


def observed(phase: WorkloadPhase, condition: Mapping[str, Any]) -> Observed:
    """Return a phase with what a condition says about it."""
    return Observed(
        phase, condition.get("reason") or condition["type"], condition.get("message") or ""
    )


_PHASES = {  # by condition, in this order
    "Failed": WorkloadPhase.FAILED,
    "Complete": WorkloadPhase.SUCCEEDED,
    "Completed": WorkloadPhase.SUCCEEDED,
    "Suspended": WorkloadPhase.SUSPENDED,
    # On the way to an end: pods are still to go.
    "FailureTarget": WorkloadPhase.RUNNING,
    "SuccessCriteriaMet": WorkloadPhase.RUNNING,
}


def by_conditions(obj: Mapping[str, Any], working: bool) -> Observed:
    """Return the state of a kind whose conditions are like those of batch/v1 Job.

    working: whether it has pods that run.
    """
    held = {one["type"]: one for one in conditions(obj)}
    for name, phase in _PHASES.items():
        if name in held:
            return observed(phase, held[name])
    if (obj.get("spec") or {}).get("suspend"):
        return Observed(WorkloadPhase.SUSPENDED)
    return Observed(WorkloadPhase.RUNNING if working else WorkloadPhase.PENDING)


def next_attempt(template: Manifest) -> Manifest:
    """Return the part of a merge patch that has a pod template go on like this one."""
    affinity = (template["spec"].get("affinity") or {}).get("nodeAffinity")
    return {
        "metadata": {"labels": template["metadata"]["labels"]},
        "spec": {"affinity": {"nodeAffinity": affinity}},
    }
