"""AscendJob (MindCluster's ascend-operator), placed by Volcano."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests import ascend
from rekindle.engines.kubernetes.manifests.kinds.base import (
    Gvk,
    Manifest,
    Observed,
    Rendered,
    WorkloadPhase,
    observed,
    workload,
)
from rekindle.engines.kubernetes.manifests.kinds.base import conditions as held
from rekindle.engines.kubernetes.manifests.kinds.kubeflow import (
    last_condition,
    replica_specs,
    replica_templates,
    role_patches,
)
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import UsageError

LEADERS = {"pytorch": "Master", "mindspore": "Scheduler", "tensorflow": "Chief"}
_CONTAINER = "ascend"
_REFUSED = "JobValidFailed"  # its operator will never make a pod of it


class AscendJob:
    """Its operator makes a deleted pod anew, but a Failed pod may fail the job.

    So the kubelet starts a container anew that has ended, unless MindCluster is to see it: that
    wants pods which end for good.
    """

    gvk = Gvk("mindxdl.gitee.com", "v1", "ascendjobs", "AscendJob")
    # There is no webhook: affinity may be patched at any time, and new pods follow it.

    def restart(self, pods: KubernetesSettings) -> str:
        """Return nothing: it stands beside the template."""
        return ""

    def render(self, job: Rendered) -> Manifest:
        """Return the AscendJob."""
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
        roles = replica_specs(job, LEADERS[pods.ascend.framework], restart)
        found = workload(
            self.gvk,
            job,
            {
                "schedulerName": "volcano",
                "successPolicy": "AllWorkers",
                "runPolicy": run,
                "replicaSpecs": roles,
            },
        )
        found["metadata"]["labels"] = {
            **found["metadata"]["labels"],
            ascend.FRAMEWORK: pods.ascend.framework,
        }
        return found

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return MindCluster's ConfigMap of the job, if it is mounted."""
        return reset_config(job)

    def check(self, workload: Manifest) -> None:
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

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where its roles have theirs."""
        if manifest["kind"] != self.gvk.kind:
            return []
        return replica_templates(manifest["spec"]["replicaSpecs"])

    def status(self, obj: Manifest) -> Observed:
        """Return what its last condition says; what is refused has failed."""
        found = last_condition(obj)
        if found.phase is WorkloadPhase.PENDING:
            for one in held(obj):
                if one.get("reason") == _REFUSED:
                    return observed(WorkloadPhase.FAILED, one)
        return found

    def suspend_patch(self) -> None:
        """Return nothing: it cannot be suspended."""

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest:
        """Return the patch that pods made later follow; it cannot be suspended."""
        return self.avoid_patch(workload)

    def avoid_patch(self, workload: Manifest) -> Manifest:
        """Return the same."""
        return {"spec": {"replicaSpecs": role_patches(workload["spec"]["replicaSpecs"])}}

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods."""
        return f"job-name={name}"


def reset_config(job: Rendered) -> list[Manifest]:
    """Return MindCluster's ConfigMap of a job, if its pods mount it."""
    asked = job.pods.ascend.reset_config
    if not (job.pods.by_mindcluster if asked is None else asked):
        return []
    return [ascend.reset_config(job.name, job.pods.namespace)]
