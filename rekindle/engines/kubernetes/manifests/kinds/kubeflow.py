"""Define Kubeflow's kinds, PyTorchJob and TrainJob, and the parts that AscendJob shares. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests import Manifest, given
from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Adapter,
    Gvk,
    Observed,
    Rendered,
    WorkloadPhase,
    conditions,
    next_attempt,
    observed,
    workload,
)
from rekindle.engines.kubernetes.manifests.kinds.batch import (
    jobset_holders,
    jobset_spec,
    status_of_jobs,
    suspend,
)

RUNTIME = Gvk("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")

# The trainer's numbers apply to the runtime's job with this label.
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}

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


def _trainjob_spec(job: Rendered) -> Manifest:
    runtime = {"apiGroup": RUNTIME.group, "kind": RUNTIME.kind, "name": job.name}
    return {"runtimeRef": runtime, "trainer": {"numNodes": job.replicas}}


def _runtime(job: Rendered) -> list[Manifest]:
    inside = jobset_spec(job)
    nodes = inside["replicatedJobs"][0]
    nodes["template"] = {"metadata": {"labels": dict(_STEP)}} | nodes["template"]
    spec: Manifest = {"mlPolicy": {"numNodes": job.replicas}}
    if job.pods.gang:
        spec["podGroupPolicy"] = {"coscheduling": {}}
    spec["template"] = {"spec": inside}
    return [workload(RUNTIME, job, spec)]


# The runtime has the pods' template. The TrainJob has the number of pods.
TRAINJOB = Adapter(
    gvk=Gvk("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    pods_label="jobset.sigs.k8s.io/jobset-name",  # the JobSet has the same name
    spec=_trainjob_spec,
    beside=_runtime,
    templates_in=RUNTIME.kind,
    holders=lambda spec: jobset_holders(spec["template"]["spec"]),
    status=lambda obj: status_of_jobs(obj, "jobsStatus"),
    suspend=suspend,
    next_templates=None,  # the JobSet of the TrainJob refuses any change of affinity
)


def replica_specs(job: Rendered, leader: str, restart: str) -> Manifest:
    """Return one leader, if the operator needs one, and workers. Rekindle treats them equally."""
    counts = {leader: 1, WORKER: job.replicas - 1} if leader else {WORKER: job.replicas}
    return {
        role: {"replicas": count, "restartPolicy": restart, "template": job.template}
        for role, count in counts.items()
        if count
    }


def role_patches(specs: Manifest) -> Manifest:
    """Return the part of a merge patch that gives the pods of all roles the templates of these."""
    return {role: {"template": next_attempt(one["template"])} for role, one in specs.items()}


def last_condition(obj: Manifest) -> Observed:
    """Return the state as these operators report it: the last true condition."""
    held = [one for one in conditions(obj) if one["type"] in _PHASES]
    if not held:
        return Observed(WorkloadPhase.PENDING)
    over = [one for one in held if one["type"] in _OVER]
    last = (over or held)[-1]
    return observed(_PHASES[last["type"]], last)


def _pytorchjob_spec(job: Rendered) -> Manifest:
    run: Manifest = {"backoffLimit": FOREVER, "cleanPodPolicy": "Running"}
    if job.pods.gang:
        run["schedulingPolicy"] = {
            "minAvailable": job.least,
            **given({"queue": job.pods.queue, "priorityClass": job.pods.priority_class}),
        }
    # A Master that ends with success would end the job. It would also make workers wait for its
    # name.
    return {"runPolicy": run, "pytorchReplicaSpecs": replica_specs(job, "", "OnFailure")}


# The kubelet restarts an ended container. The operator recreates a missing pod.
PYTORCHJOB = Adapter(
    gvk=Gvk("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
    pods_label="training.kubeflow.org/job-name",
    spec=_pytorchjob_spec,
    restart=lambda pods: "",
    holders=lambda spec: list(spec["pytorchReplicaSpecs"].values()),
    status=last_condition,
    suspend=lambda on: {"runPolicy": {"suspend": on}},
    next_templates=lambda spec: {"pytorchReplicaSpecs": role_patches(spec["pytorchReplicaSpecs"])},
    follows=True,  # the webhook does not check templates
)
