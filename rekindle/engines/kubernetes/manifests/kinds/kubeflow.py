"""Kubeflow's kinds: PyTorchJob, TrainJob, and what AscendJob shares with them. Pure."""

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
    conditions,
    next_attempt,
    observed,
    workload,
)
from rekindle.engines.kubernetes.manifests.kinds.batch import jobset_spec
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings

RUNTIME = Gvk("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")

# Which of a runtime's jobs the trainer's numbers are for.
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_TRAINJOB_PHASES = (
    ("Failed", WorkloadPhase.FAILED),
    ("Complete", WorkloadPhase.SUCCEEDED),
    ("Suspended", WorkloadPhase.SUSPENDED),
)


class TrainJob:
    """The pods' template is in the runtime; the TrainJob says how many of them there are."""

    gvk = Gvk("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
    # The JobSet behind it refuses any change of affinity.

    def restart(self, pods: KubernetesSettings) -> str:
        """Return the restartPolicy of its pods."""
        return "Never"

    def render(self, job: Rendered) -> Manifest:
        """Return the TrainJob."""
        runtime = {"apiGroup": RUNTIME.group, "kind": RUNTIME.kind, "name": job.name}
        return workload(
            self.gvk, job, {"runtimeRef": runtime, "trainer": {"numNodes": job.replicas}}
        )

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return the runtime."""
        inside = jobset_spec(job)
        nodes = inside["replicatedJobs"][0]
        nodes["template"] = {"metadata": {"labels": dict(_STEP)}} | nodes["template"]
        spec: Manifest = {"mlPolicy": {"numNodes": job.replicas}}
        if job.pods.gang:
            spec["podGroupPolicy"] = {"coscheduling": {}}
        spec["template"] = {"spec": inside}
        return [workload(RUNTIME, job, spec)]

    def check(self, workload: Manifest) -> None:
        """Refuse nothing: its webhook does."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where the runtime has them; the TrainJob has none."""
        if manifest["kind"] != RUNTIME.kind:
            return []
        jobs = manifest["spec"]["template"]["spec"]["replicatedJobs"]
        return [(one["template"]["spec"], "template") for one in jobs]

    def status(self, obj: Manifest) -> Observed:
        """Return what its conditions and the counts of its jobs say."""
        jobs = (obj.get("status") or {}).get("jobsStatus") or []
        return by_conditions(obj, _TRAINJOB_PHASES) or active(
            obj, any(one.get("active") or one.get("ready") for one in jobs)
        )

    def suspend_patch(self) -> Manifest:
        """Return the patch that ends all pods."""
        return {"spec": {"suspend": True}}

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest | None:
        """Return the patch that lets it go on, where nodes are to be avoided none."""
        return None if avoid else {"spec": {"suspend": False}}

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods, which are those of the JobSet of the same name."""
        return f"jobset.sigs.k8s.io/jobset-name={name}"


_PHASES = {
    "Created": WorkloadPhase.PENDING,
    "Running": WorkloadPhase.RUNNING,
    "Restarting": WorkloadPhase.RUNNING,
    "Suspended": WorkloadPhase.SUSPENDED,
    "Succeeded": WorkloadPhase.SUCCEEDED,
    "Failed": WorkloadPhase.FAILED,
}
_OVER = ("Failed", "Succeeded")
WORKER = "Worker"


def replica_specs(job: Rendered, leader: str, restart: str) -> Manifest:
    """Return one leader, if the operator wants one, and the rest as workers: to us all the same."""
    counts = {leader: 1, WORKER: job.replicas - 1} if leader else {WORKER: job.replicas}
    return {
        role: {"replicas": count, "restartPolicy": restart, "template": job.template}
        for role, count in counts.items()
        if count
    }


def replica_templates(specs: Manifest) -> list[tuple[Manifest, str]]:
    """Return where the templates of all roles are."""
    return [(role, "template") for role in specs.values()]


def role_patches(specs: Manifest) -> Manifest:
    """Return the part of a merge patch that has the pods of all roles go on like these."""
    return {role: {"template": next_attempt(one["template"])} for role, one in specs.items()}


def last_condition(obj: Manifest) -> Observed:
    """Return the state as these operators tell it: by the last condition that holds."""
    held = [one for one in conditions(obj) if one["type"] in _PHASES]
    if not held:
        return Observed(WorkloadPhase.PENDING)
    over = [one for one in held if one["type"] in _OVER]
    last = (over or held)[-1]
    return observed(_PHASES[last["type"]], last)


class PyTorchJob:
    """The kubelet starts a container anew that has ended; the operator a pod that is gone."""

    gvk = Gvk("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")

    def restart(self, pods: KubernetesSettings) -> str:
        """Return nothing: it stands beside the template."""
        return ""

    def render(self, job: Rendered) -> Manifest:
        """Return the PyTorchJob."""
        run: Manifest = {"backoffLimit": FOREVER, "cleanPodPolicy": "Running"}
        if job.pods.gang:
            policy: Manifest = {"minAvailable": job.least}
            if job.pods.queue:
                policy["queue"] = job.pods.queue
            if job.pods.priority_class:
                policy["priorityClass"] = job.pods.priority_class
            run["schedulingPolicy"] = policy
        # A Master that ends with success would end the job, and have workers wait for its name.
        roles = replica_specs(job, "", "OnFailure")
        return workload(self.gvk, job, {"runPolicy": run, "pytorchReplicaSpecs": roles})

    def beside(self, job: Rendered) -> list[Manifest]:
        """Return nothing: it needs nothing."""
        return []

    def check(self, workload: Manifest) -> None:
        """Refuse nothing: its webhook does."""

    def templates(self, manifest: Manifest) -> list[tuple[Manifest, str]]:
        """Return where its roles have theirs."""
        return replica_templates(manifest["spec"]["pytorchReplicaSpecs"])

    def status(self, obj: Manifest) -> Observed:
        """Return what its last condition says."""
        return last_condition(obj)

    def suspend_patch(self) -> Manifest:
        """Return the patch that ends all pods."""
        return {"spec": {"runPolicy": {"suspend": True}}}

    def resume_patch(self, workload: Manifest, avoid: tuple[str, ...]) -> Manifest:
        """Return the patch that lets it go on; its webhook looks at no template."""
        return {"spec": {"runPolicy": {"suspend": False}, **self.avoid_patch(workload)["spec"]}}

    def avoid_patch(self, workload: Manifest) -> Manifest:
        """Return the patch that pods made later follow; suspended or not, it stays so."""
        roles = role_patches(workload["spec"]["pytorchReplicaSpecs"])
        return {"spec": {"pytorchReplicaSpecs": roles}}

    def pods_selector(self, name: str) -> str:
        """Return the selector of its pods."""
        return f"training.kubeflow.org/job-name={name}"
