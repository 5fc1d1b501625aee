"""The Jobs of a JobSet: their names and specs, and their part of the status."""

from __future__ import annotations

from collections.abc import Iterator

from cluster import kinds
from cluster.controllers.loop import condition, owner_reference
from cluster.refusals import Object
from cluster.store import fresh

LABELS = "jobset.sigs.k8s.io/"


def render(jobset: Object) -> Iterator[Object]:
    """Yield all Jobs of the JobSet, as the controller must create them now."""
    metadata, spec = jobset["metadata"], jobset["spec"]
    number = 0
    for each in spec["replicatedJobs"]:
        for index in range(each["replicas"]):
            name = f"{metadata['name']}-{each['name']}-{index}"
            labels = {
                LABELS + "jobset-name": metadata["name"],
                LABELS + "jobset-uid": metadata["uid"],
                LABELS + "replicatedjob-name": each["name"],
                LABELS + "replicatedjob-replicas": str(each["replicas"]),
                LABELS + "job-index": str(index),
                LABELS + "job-global-index": str(number),
                LABELS + "restart-attempt": "0",
            }
            yield _render(jobset, each, name, labels)
            number += 1


def statuses(jobset: Object, jobs: list[Object]) -> list[Object]:
    """Return the entries of replicatedJobsStatus."""
    label = LABELS + "replicatedjob-name"
    return [
        {"name": name, **_count([job for job in jobs if job["metadata"]["labels"][label] == name])}
        for name in (each["name"] for each in jobset["spec"]["replicatedJobs"])
    ]


def _render(jobset: Object, each: Object, name: str, labels: dict[str, str]) -> Object:
    metadata, spec = jobset["metadata"], jobset["spec"]
    template = fresh(each["template"])
    job_spec = template["spec"]
    job_spec["suspend"] = bool(spec["suspend"])
    pod = job_spec["template"]
    for part in (template.setdefault("metadata", {}), pod.setdefault("metadata", {})):
        part.setdefault("labels", {}).update(labels)
        part.setdefault("annotations", {}).update(labels)
    if spec["network"]["enableDNSHostnames"]:
        pod["spec"]["subdomain"] = spec["network"].get("subdomain") or metadata["name"]
    made = {**template["metadata"], "name": name}
    made["ownerReferences"] = [owner_reference(kinds.JOBSETS, jobset)]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": made, "spec": job_spec}


def _count(jobs: list[Object]) -> Object:
    counted = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
    for job in jobs:
        status = job.get("status") or {}
        ready = status.get("ready", 0) + status.get("succeeded", 0)
        if condition(job, "Complete"):
            counted["succeeded"] += 1
        elif condition(job, "Failed"):
            counted["failed"] += 1
        elif job["spec"].get("suspend"):
            counted["suspended"] += 1
        else:
            counted["active"] += bool(status.get("active"))
        if ready >= min(job["spec"]["parallelism"], job["spec"].get("completions", 1)):
            counted["ready"] += 1
    return counted
