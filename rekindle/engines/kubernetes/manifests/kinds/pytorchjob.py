"""PyTorchJob (Kubeflow v1), for clusters that still have its operator."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Gvk,
    Manifest,
    Observed,
    Rendered,
    workload,
)
from rekindle.engines.kubernetes.manifests.kinds.kubeflow import (
    last_condition,
    replica_specs,
    replica_templates,
    role_patches,
)
from rekindle.engines.kubernetes.manifests.settings import Pods


class PyTorchJob:
    """The kubelet starts a container anew that has ended; the operator a pod that is gone."""

    gvk = Gvk("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")

    def restart(self, pods: Pods) -> str:
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
