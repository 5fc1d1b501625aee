"""batch/v1 Job with indexes: what every cluster has."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Gvk,
    Manifest,
    Observed,
    Phase,
    Rendered,
    active,
    by_conditions,
    next_attempt,
    workload,
)
from rekindle.engines.kubernetes.manifests.settings import Pods

_PHASES = (
    ("Failed", Phase.FAILED),
    ("Complete", Phase.SUCCEEDED),
    ("Suspended", Phase.SUSPENDED),
    # On the way to an end: pods are still to go.
    ("FailureTarget", Phase.RUNNING),
    ("SuccessCriteriaMet", Phase.RUNNING),
)


class IndexedJob:
    """Its controller makes a lost pod anew, with the same index, 10 s later or more."""

    gvk = Gvk("batch", "v1", "jobs", "Job")

    def restart(self, pods: Pods) -> str:
        """Return the restartPolicy of its pods."""
        return "Never"

    def render(self, job: Rendered) -> Manifest:
        """Return the Job."""
        return workload(self.gvk, job, job_spec(job))

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return nothing: it needs nothing."""
        return []

    def check(self, workload: Manifest) -> None:
        """Refuse nothing: the API server does."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where its one template is."""
        return [(manifest["spec"], "template")]

    def status(self, obj: Manifest) -> Observed:
        """Return what its conditions and counts say."""
        found = obj.get("status") or {}
        return by_conditions(obj, _PHASES) or active(obj, bool(found.get("active")))

    def suspend_patch(self) -> Manifest:
        """Return the patch that ends all pods; they are not counted as failed."""
        return {"spec": {"suspend": True}}

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest:
        """Return the patch that lets it go on; affinity may change while it is suspended."""
        template = workload["spec"]["template"]
        return {"spec": {"suspend": False, "template": next_attempt(template)}}

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods."""
        return f"batch.kubernetes.io/job-name={name}"


def job_spec(job: Rendered) -> Manifest:
    """Return the spec of a Job that never gives up; also what a JobSet has inside."""
    return {
        "completionMode": "Indexed",
        "completions": job.replicas,
        "parallelism": job.replicas,
        "backoffLimit": FOREVER,
        # At once, not when the old one has used up its grace, or never where its host is dead. Two
        # pods of one index do no harm: the coordinator says which node a pod is. A podFailurePolicy
        # would forbid it.
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": job.template,
    }
