"""Define the kinds that Volcano places: AscendJob (MindCluster's operator) and Volcano's Job."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests import Manifest, ascend, given
from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Adapter,
    Gvk,
    Observed,
    Rendered,
    WorkloadPhase,
    conditions,
    observed,
)
from rekindle.engines.kubernetes.manifests.kinds.kubeflow import (
    last_condition,
    replica_specs,
    role_patches,
)
from rekindle.errors import UsageError

LEADERS = {"pytorch": "Master", "mindspore": "Scheduler", "tensorflow": "Chief"}
_CONTAINER = "ascend"
_REFUSED = "JobValidFailed"  # the operator will never create pods for the workload
TASK = "node"

_VOLCANO_PHASES = {
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
    policy = {
        "minAvailable": job.least,
        "queue": pods.queue or "default",
        **given({"priorityClass": pods.priority_class}),
    }
    run: Manifest = {"cleanPodPolicy": "Running"}
    if pods.ascend.backoff_limit is not None:
        run["backoffLimit"] = pods.ascend.backoff_limit
    if pods.gang is not False:
        run["schedulingPolicy"] = policy
    restart = "Never" if pods.by_mindcluster else "OnFailure"
    return {
        "schedulerName": "volcano",
        "successPolicy": "AllWorkers",
        "runPolicy": run,
        "replicaSpecs": replica_specs(job, LEADERS[pods.ascend.framework], restart),
    }


def reset_config(job: Rendered) -> list[Manifest]:
    """Return MindCluster's ConfigMap of a job, if its pods mount it."""
    asked = job.pods.ascend.reset_config
    if not (job.pods.by_mindcluster if asked is None else asked):
        return []
    return [ascend.reset_config(job.name, job.pods.namespace)]


def _check(workload: Manifest) -> None:
    """Check the workload as the operator does. Raises UsageError: the operator would refuse it."""
    framework = workload["metadata"]["labels"].get(ascend.FRAMEWORK)
    roles = workload["spec"]["replicaSpecs"]
    leader = LEADERS.get(framework)
    if leader is None:
        raise UsageError(
            f"ascendjob: label {ascend.FRAMEWORK} is {framework!r}; give one of "
            f"{', '.join(LEADERS)}"
        )
    for role in roles:
        if role not in (leader, "Worker"):
            raise UsageError(
                f"ascendjob: replicaSpecs.{role} is not a role of {framework}; its roles are "
                f"{leader} and Worker"
            )
    count = roles.get(leader, {}).get("replicas", 1) if leader in roles else 0
    if count != 1:
        raise UsageError(
            f"ascendjob: replicaSpecs.{leader} has {count} replicas; {framework} has exactly "
            "one leader"
        )
    for role, found in roles.items():
        containers = found["template"]["spec"]["containers"]
        if not any(one["name"] == _CONTAINER and one.get("image") for one in containers):
            raise UsageError(
                f"ascendjob: replicaSpecs.{role} has no container named {_CONTAINER} with an "
                "image; the operator of AscendJobs needs it"
            )


def _status(obj: Manifest) -> Observed:
    found = last_condition(obj)
    if found.phase is WorkloadPhase.PENDING:
        for one in conditions(obj):
            if one.get("reason") == _REFUSED:
                return observed(WorkloadPhase.FAILED, one)
    return found


# The operator recreates a deleted pod, but a Failed pod may fail the job. So the kubelet restarts
# an ended container. With MindCluster's recovery, pods must end for good, so that MindCluster sees
# it.
ASCENDJOB = Adapter(
    gvk=Gvk("mindxdl.gitee.com", "v1", "ascendjobs", "AscendJob"),
    pods_label="job-name",
    spec=_spec,
    labels=lambda pods: {ascend.FRAMEWORK: pods.ascend.framework},
    beside=reset_config,
    restart=lambda pods: "",
    check=_check,
    holders=lambda spec: list(spec["replicaSpecs"].values()),
    status=_status,
    next_templates=lambda spec: {"replicaSpecs": role_patches(spec["replicaSpecs"])},
    follows=True,  # the kind has no webhook
)


def _volcano_spec(job: Rendered) -> Manifest:
    pods = job.pods
    return {
        "schedulerName": "volcano",
        "minAvailable": job.least if pods.gang is not False else 1,
        "queue": pods.queue or "default",
        "maxRetry": FOREVER,
        **given({"priorityClassName": pods.priority_class, "policies": _policies(job)}),
        "tasks": [{"name": TASK, "replicas": job.replicas, "template": job.template}],
    }


def _policies(job: Rendered) -> list[Manifest]:
    """Return Volcano's policies for pods: none, unless MindCluster depends on them."""
    if not job.pods.by_mindcluster or job.pods.ascend.pod_rescheduling:
        return []
    found = [{"event": "PodEvicted", "action": "RestartJob"}]
    if job.pods.ascend.fault_retry_times:
        found.append({"event": "PodFailed", "action": "Ignore"})
    elif job.pods.ascend.recover_policy_path:
        found.append({"event": "PodFailed", "action": "RestartTask"})
    return found


def _volcano_status(obj: Manifest) -> Observed:
    state = (obj.get("status") or {}).get("state") or {}
    name = state.get("phase") or "Pending"
    return Observed(
        _VOLCANO_PHASES.get(name, WorkloadPhase.PENDING),
        state.get("reason") or name,
        state.get("message", ""),
    )


# Without policies the controller only recreates a deleted pod. Each restart by policy counts as a
# retry of the whole job, so the kubelet restarts an ended container. MindCluster needs pods that
# end for good, and policies.
VOLCANO_JOB = Adapter(
    gvk=Gvk("batch.volcano.sh", "v1alpha1", "jobs", "Job"),
    pods_label="volcano.sh/job-name",
    spec=_volcano_spec,
    beside=reset_config,
    restart=lambda pods: "Never" if pods.by_mindcluster else "OnFailure",
    holders=lambda spec: list(spec["tasks"]),
    status=_volcano_status,
    next_templates=None,  # the webhook does not allow changes of the templates
)
