"""Volcano's Job (batch.volcano.sh)."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.ascendjob import reset_config
from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Adapter,
    Gvk,
    Manifest,
    Observed,
    Rendered,
    WorkloadPhase,
)

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


def _spec(job: Rendered) -> Manifest:
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
    return spec


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


def _status(obj: Manifest) -> Observed:
    state = (obj.get("status") or {}).get("state") or {}
    name = state.get("phase") or "Pending"
    return Observed(
        _PHASES.get(name, WorkloadPhase.PENDING),
        state.get("reason") or name,
        state.get("message", ""),
    )


# Without policies its controller makes a deleted pod again, and does nothing else. Each restart by
# policy counts as a retry of the whole job, so the kubelet starts an ended container again.
# MindCluster needs pods that end for good, and policies.
VOLCANO_JOB = Adapter(
    gvk=Gvk("batch.volcano.sh", "v1alpha1", "jobs", "Job"),
    pods_label="volcano.sh/job-name",
    spec=_spec,
    beside=reset_config,
    restart=lambda pods: "Never" if pods.by_mindcluster else "OnFailure",
    holders=lambda spec: list(spec["tasks"]),
    status=_status,
    next_templates=None,  # its webhook keeps the templates as they are
)
