"""What a kind of workload is to the engine: what it can do, its manifest, what it tells."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

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


class Adapter(Protocol):
    """One kind of workload. All of it is pure: manifests in, manifests and values out."""

    @property
    def gvk(self) -> Gvk:
        """What it is called in the API."""

    def restart(self, pods: KubernetesSettings) -> str:
        """Return the restartPolicy of its pods; "": it stands elsewhere in the manifest."""

    def render(self, job: Rendered) -> Manifest:
        """Return the workload."""

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return what has to be there before the workload."""

    def check(self, workload: Manifest) -> None:
        """Raise UsageError if its controller would refuse it (after people's patches, say)."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where pod templates are: maps that hold one, and the key."""

    def status(self, obj: Manifest) -> Observed:
        """Return what a live workload says of itself."""

    def suspend_patch(self) -> Manifest | None:
        """Return the merge patch (RFC 7396) that ends all pods; None: the kind has none."""

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest | None:
        """Return the merge patch by which a live workload goes on like this one.

        workload: the manifest of the next attempt, which is to avoid these nodes. Of a kind that
        cannot be suspended, the pods that are made later follow the patch. None: it has to be made
        anew.
        """

    def pods_selector(self, name: str) -> str:
        """Return the label selector of the pods of the workload of this name."""


@runtime_checkable
class Following(Protocol):
    """A kind whose pods, if they are made later, follow what a live workload is patched to."""

    def avoid_patch(self, workload: Manifest) -> Manifest:
        """Return the merge patch by which they keep off the nodes that this manifest avoids."""


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


def by_conditions(
    obj: Mapping[str, Any], phases: Iterable[tuple[str, WorkloadPhase]]
) -> Observed | None:
    """Return the first of these phases whose condition holds."""
    held = {one["type"]: one for one in conditions(obj)}
    for name, phase in phases:
        if name in held:
            return observed(phase, held[name])
    return None


def active(obj: Mapping[str, Any], working: bool) -> Observed:
    """Return the phase of a workload that is neither over nor suspended."""
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
