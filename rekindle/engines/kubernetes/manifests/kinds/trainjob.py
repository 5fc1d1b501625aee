"""TrainJob (Kubeflow Trainer v2): a JobSet behind a TrainingRuntime of the job's own."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.base import (
    Gvk,
    Manifest,
    Observed,
    Phase,
    Rendered,
    active,
    by_conditions,
    workload,
)
from rekindle.engines.kubernetes.manifests.kinds.jobset import jobset_spec
from rekindle.engines.kubernetes.manifests.settings import Pods

RUNTIME = Gvk("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")

# Which of a runtime's jobs the trainer's numbers are for.
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_PHASES = (
    ("Failed", Phase.FAILED),
    ("Complete", Phase.SUCCEEDED),
    ("Suspended", Phase.SUSPENDED),
)


class TrainJob:
    """The pods' template is in the runtime; the TrainJob says how many of them there are."""

    gvk = Gvk("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
    # The JobSet behind it refuses any change of affinity.

    def restart(self, pods: Pods) -> str:
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
        return by_conditions(obj, _PHASES) or active(
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
