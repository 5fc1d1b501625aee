"""Define two kinds: the indexed Job of batch/v1, which every cluster has, and JobSet. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests import Manifest
from rekindle.engines.kubernetes.manifests.kinds.base import (
    FOREVER,
    Adapter,
    Gvk,
    Observed,
    Rendered,
    by_conditions,
    next_attempt,
)

NODES = "node"  # the replicated job of a JobSet that has all nodes


def job_spec(job: Rendered) -> Manifest:
    """Return the spec of a Job that never gives up; a JobSet has the same one."""
    return {
        "completionMode": "Indexed",
        "completions": job.replicas,
        "parallelism": job.replicas,
        "backoffLimit": FOREVER,
        # The Job replaces a pod immediately, and does not wait for the end of the old one, which
        # may never come on a dead host. Two pods of one index do no harm: the coordinator assigns
        # node ranks to pods. A podFailurePolicy would forbid this setting.
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": job.template,
    }


def suspend(on: bool) -> Manifest:
    """Return the part of a spec that suspends or resumes."""
    return {"suspend": on}


# The controller recreates a lost pod with the same index, after 10 s or more.
INDEXED_JOB = Adapter(
    gvk=Gvk("batch", "v1", "jobs", "Job"),
    pods_label="batch.kubernetes.io/job-name",
    spec=job_spec,
    holders=lambda spec: [spec],
    status=lambda obj: by_conditions(obj, bool((obj.get("status") or {}).get("active"))),
    suspend=suspend,
    next_templates=lambda spec: {"template": next_attempt(spec["template"])},
)


def jobset_spec(job: Rendered) -> Manifest:
    """Return the spec of a JobSet; a TrainingRuntime has the same one."""
    return {
        "network": {"enableDNSHostnames": False},  # the job has its own headless Service
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": job_spec(job)}}],
    }


def jobset_holders(spec: Manifest) -> list[Manifest]:
    """Return the specs of a JobSet's Jobs, which have the pod templates."""
    return [one["template"]["spec"] for one in spec["replicatedJobs"]]


def status_of_jobs(obj: Manifest, counts: str) -> Observed:
    """Return the state of a workload of several Jobs. counts: the name of their list."""
    jobs = (obj.get("status") or {}).get(counts) or []
    return by_conditions(obj, any(one.get("active") or one.get("ready") for one in jobs))


# The Job in it recreates lost pods. The JobSet itself never restarts, because its Job cannot fail.
JOBSET = Adapter(
    gvk=Gvk("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    pods_label="jobset.sigs.k8s.io/jobset-name",
    spec=jobset_spec,
    holders=jobset_holders,
    status=lambda obj: status_of_jobs(obj, "replicatedJobsStatus"),
    suspend=suspend,
    next_templates=None,  # the webhook refuses any change of affinity, also during a suspension
)
