"""batch/v1 Job with indexes, which every cluster has, and JobSet, which has such Jobs. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Gvk,
    Manifest,
    Observed,
    Rendered,
    WorkloadPhase,
    active,
    by_conditions,
    next_attempt,
    workload,
)
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings

_PHASES = (
    ("Failed", WorkloadPhase.FAILED),
    ("Complete", WorkloadPhase.SUCCEEDED),
    ("Suspended", WorkloadPhase.SUSPENDED),
    # On the way to an end: pods are still to go.
    ("FailureTarget", WorkloadPhase.RUNNING),
    ("SuccessCriteriaMet", WorkloadPhase.RUNNING),
)


class IndexedJob:
    """Its controller makes a lost pod anew, with the same index, 10 s later or more."""

    gvk = Gvk("batch", "v1", "jobs", "Job")

    def restart(self, pods: KubernetesSettings) -> str:
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


NODES = "node"  # the replicated job that holds all of them

_JOBSET_PHASES = (
    ("Failed", WorkloadPhase.FAILED),
    ("Completed", WorkloadPhase.SUCCEEDED),
    ("Suspended", WorkloadPhase.SUSPENDED),
)


class JobSet:
    """The Job inside makes lost pods anew; the JobSet itself never restarts, as it cannot fail."""

    gvk = Gvk("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
    # Its webhook refuses any change of affinity, suspended or not.

    def restart(self, pods: KubernetesSettings) -> str:
        """Return the restartPolicy of its pods."""
        return "Never"

    def render(self, job: Rendered) -> Manifest:
        """Return the JobSet."""
        return workload(self.gvk, job, jobset_spec(job))

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return nothing: it needs nothing."""
        return []

    def check(self, workload: Manifest) -> None:
        """Refuse nothing: its webhook does."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where its replicated jobs have theirs."""
        return [(one["template"]["spec"], "template") for one in manifest["spec"]["replicatedJobs"]]

    def status(self, obj: Manifest) -> Observed:
        """Return what its conditions and the counts of its jobs say."""
        found = obj.get("status") or {}
        jobs = found.get("replicatedJobsStatus") or []
        return by_conditions(obj, _JOBSET_PHASES) or active(
            obj, any(one.get("active") or one.get("ready") for one in jobs)
        )

    def suspend_patch(self) -> Manifest:
        """Return the patch that ends all pods."""
        return {"spec": {"suspend": True}}

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest | None:
        """Return the patch that lets it go on, where nodes are to be avoided none."""
        return None if avoid else {"spec": {"suspend": False}}

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods."""
        return f"jobset.sigs.k8s.io/jobset-name={name}"


def jobset_spec(job: Rendered) -> Manifest:
    """Return the spec of a JobSet; also what a TrainingRuntime has inside."""
    return {
        "network": {"enableDNSHostnames": False},  # the job has a headless Service of its own
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": job_spec(job)}}],
    }
