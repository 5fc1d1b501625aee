"""Volcano's Job (batch.volcano.sh)."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.ascendjob import reset_config
from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Gvk,
    Manifest,
    Observed,
    Rendered,
    WorkloadPhase,
    workload,
)
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings

TASK = "node"

_PHASES = {
    "Pending": WorkloadPhase.PENDING,
    "Restarting": WorkloadPhase.PENDING,
    "Running": WorkloadPhase.RUNNING,
    "Completing": WorkloadPhase.RUNNING,
    "Terminating": WorkloadPhase.RUNNING,
    "Aborting": WorkloadPhase.SUSPENDED,
    "Aborted": WorkloadPhase.SUSPENDED,
    "Completed": WorkloadPhase.SUCCEEDED,
    "Terminated": WorkloadPhase.FAILED,
    "Failed": WorkloadPhase.FAILED,
}


class VolcanoJob:
    """Without policies its controller makes a deleted pod anew, and nothing else.

    Whatever restarts by policy counts as a retry of the whole job, so the kubelet starts a
    container anew that has ended. MindCluster wants pods that end for good, and policies.
    """

    gvk = Gvk("batch.volcano.sh", "v1alpha1", "jobs", "Job")
    # Its webhook keeps the templates as they are.

    def restart(self, pods: KubernetesSettings) -> str:
        """Return the restartPolicy of its pods."""
        return "Never" if pods.by_mindcluster else "OnFailure"

    def render(self, job: Rendered) -> Manifest:
        """Return the Job."""
        pods = job.pods
        spec: Manifest = {
            "schedulerName": "volcano",
            "minAvailable": job.least if pods.gang is not False else 1,
            "queue": pods.queue or "default",
            "maxRetry": FOREVER,
        }
        if pods.priority_class:
            spec["priorityClassName"] = pods.priority_class
        if policies := _policies(job):
            spec["policies"] = policies
        spec["tasks"] = [{"name": TASK, "replicas": job.replicas, "template": job.template}]
        return workload(self.gvk, job, spec)

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return MindCluster's ConfigMap of the job, if it is mounted."""
        return reset_config(job)

    def check(self, workload: Manifest) -> None:
        """Refuse nothing: its webhook does."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where its tasks have theirs."""
        if manifest["kind"] != self.gvk.kind:
            return []
        return [(task, "template") for task in manifest["spec"]["tasks"]]

    def status(self, obj: Manifest) -> Observed:
        """Return what its state says."""
        state = (obj.get("status") or {}).get("state") or {}
        name = state.get("phase") or "Pending"
        return Observed(
            _PHASES.get(name, WorkloadPhase.PENDING),
            state.get("reason") or name,
            state.get("message", ""),
        )

    def suspend_patch(self) -> None:
        """Return nothing: it is made anew."""

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> None:
        """Return nothing: its templates cannot be changed."""

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods."""
        return f"volcano.sh/job-name={name}"


def _policies(job: Rendered) -> list[Manifest]:
    """Return what Volcano does about pods by itself: nothing, unless MindCluster counts on it."""
    if not job.pods.by_mindcluster or job.pods.ascend.pod_rescheduling:
        return []
    found = [{"event": "PodEvicted", "action": "RestartJob"}]
    if job.pods.ascend.fault_retry_times:
        found.append({"event": "PodFailed", "action": "Ignore"})
    elif job.pods.ascend.recover_policy_path:
        found.append({"event": "PodFailed", "action": "RestartTask"})
    return found
