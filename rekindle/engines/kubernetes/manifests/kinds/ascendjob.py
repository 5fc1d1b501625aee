"""AscendJob (MindCluster's ascend-operator), placed by Volcano."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests import ascend
from rekindle.engines.kubernetes.manifests.kinds.base import (
    Adapter,
    Gvk,
    Manifest,
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
_REFUSED = "JobValidFailed"  # its operator will never make a pod of it


def _spec(job: Rendered) -> Manifest:
    pods = job.pods
    policy: Manifest = {"minAvailable": job.least, "queue": pods.queue or "default"}
    if pods.priority_class:
        policy["priorityClass"] = pods.priority_class
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
    """Refuse what the operator's own validation would."""
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
                f"ascendjob: replicaSpecs.{role} is no role of {framework}; its roles are "
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
                "image; its operator looks for that"
            )


def _status(obj: Manifest) -> Observed:
    found = last_condition(obj)
    if found.phase is WorkloadPhase.PENDING:
        for one in conditions(obj):
            if one.get("reason") == _REFUSED:
                return observed(WorkloadPhase.FAILED, one)
    return found


# Its operator makes a deleted pod again, but a Failed pod may fail the job. So the kubelet starts
# an ended container again, unless MindCluster is to see the end: that needs pods that end for good.
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
    follows=True,  # it has no webhook
)
