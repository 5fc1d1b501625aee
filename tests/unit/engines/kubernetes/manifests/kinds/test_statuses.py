"""The statuses of live workloads, converted to common phases."""

from __future__ import annotations

from typing import Any

import pytest
from rendered import adapter_of, pods, rendered, spec

from rekindle.engines.kubernetes.manifests.kinds.base import Observed, WorkloadPhase


def held(*words: str, **others: Any) -> dict[str, Any]:
    """Return a status with these conditions: type or type/reason; a - marks a false one."""
    conditions = []
    for word in words:
        name, _, reason = word.lstrip("-").partition("/")
        status = "False" if word.startswith("-") else "True"
        conditions.append({"type": name, "status": status, "reason": reason, "message": "why"})
    return {"conditions": conditions} | others


def of_jobs(**counts: int) -> dict[str, Any]:
    """Return a status with the counts of one replicated job, as JobSets and TrainJobs have it."""
    return {key: [{"name": "node"} | counts] for key in ("replicatedJobsStatus", "jobsStatus")}


def in_phase(name: str, **others: str) -> dict[str, Any]:
    """Return the status of a Volcano Job."""
    return {"state": {"phase": name} | others}


@pytest.mark.parametrize(
    ("kind", "status", "phase", "reason"),
    [
        ("indexed-job", {}, "pending", ""),
        ("indexed-job", {"active": 2}, "running", ""),
        ("indexed-job", held("Suspended/JobSuspended"), "suspended", "JobSuspended"),
        ("indexed-job", held("-Suspended", active=1), "running", ""),
        ("indexed-job", held("FailureTarget/Limit", active=1), "running", "Limit"),
        ("indexed-job", held("FailureTarget/Limit", "Failed/Limit"), "failed", "Limit"),
        ("indexed-job", held("SuccessCriteriaMet", "Complete/Reached"), "succeeded", "Reached"),
        ("jobset", of_jobs(active=1), "running", ""),
        ("jobset", of_jobs(ready=1), "running", ""),
        ("jobset", of_jobs(active=0), "pending", ""),
        ("jobset", held("Completed/AllJobsCompleted"), "succeeded", "AllJobsCompleted"),
        ("jobset", held("Failed/FailedJobs"), "failed", "FailedJobs"),
        ("jobset", held("Suspended/SuspendedJobs"), "suspended", "SuspendedJobs"),
        ("trainjob", of_jobs(active=1), "running", ""),
        ("trainjob", held("Complete/JobsCompleted"), "succeeded", "JobsCompleted"),
        ("trainjob", held("Failed/NotSupported"), "failed", "NotSupported"),
        ("trainjob", held("-Suspended/Resumed") | of_jobs(active=1), "running", ""),
        ("pytorchjob", held("Created"), "pending", "Created"),
        ("pytorchjob", held("Created", "Running"), "running", "Running"),
        ("pytorchjob", held("Created", "-Running", "Restarting"), "running", "Restarting"),
        ("pytorchjob", held("Created", "Suspended"), "suspended", "Suspended"),
        ("pytorchjob", held("Created", "Failed/JobFailed"), "failed", "JobFailed"),
        ("ascendjob", {}, "pending", ""),
        ("ascendjob", held("Created/PodGroupPending"), "pending", "PodGroupPending"),
        ("ascendjob", held("Created/JobValidFailed"), "failed", "JobValidFailed"),
        ("ascendjob", held("Created", "Running/JobRunning"), "running", "JobRunning"),
        ("ascendjob", held("Succeeded/Done", "-Running"), "succeeded", "Done"),
        ("volcano-job", {}, "pending", "Pending"),
        ("volcano-job", in_phase("Running"), "running", "Running"),
        ("volcano-job", in_phase("Restarting"), "pending", "Restarting"),
        ("volcano-job", in_phase("Aborted", reason="asked"), "suspended", "asked"),
        ("volcano-job", in_phase("Completed"), "succeeded", "Completed"),
        ("volcano-job", in_phase("Terminated"), "failed", "Terminated"),
        ("volcano-job", in_phase("Failed"), "failed", "Failed"),
    ],
)
def test_phases(kind: str, status: dict[str, Any], phase: str, reason: str) -> None:
    """The adapter converts each status of a controller to one phase."""
    found = adapter_of(kind).status({"status": status})
    assert (found.phase.value, found.reason) == (phase, reason)


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob"])
def test_suspended_before_its_controller_has_seen_it(kind: str) -> None:
    """A workload that is created suspended has this phase before its controller sets a status."""
    assert adapter_of(kind).status({"spec": {"suspend": True}}) == Observed(WorkloadPhase.SUSPENDED)


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "ascendjob", "volcano-job"])
def test_the_message_is_passed_on(kind: str) -> None:
    """The status has the message of the controller."""
    status = held("Failed") | in_phase("Failed", message="why")
    assert adapter_of(kind).status({"status": status}).message == "why"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("indexed-job", "batch.kubernetes.io/job-name=demo"),
        ("jobset", "jobset.sigs.k8s.io/jobset-name=demo"),
        ("trainjob", "jobset.sigs.k8s.io/jobset-name=demo"),
        ("pytorchjob", "training.kubeflow.org/job-name=demo"),
        ("ascendjob", "job-name=demo"),
        ("volcano-job", "volcano.sh/job-name=demo"),
    ],
)
def test_selectors(kind: str, text: str) -> None:
    """The engine finds pods by the label that the kind's controller sets."""
    assert f"{adapter_of(kind).pods_label}=demo" == text


@pytest.mark.parametrize(("min_nodes", "least"), [(0, 2), (1, 1)])
def test_gangs_are_of_the_nodes_that_the_job_needs(min_nodes: int, least: int) -> None:
    """A gang includes only the nodes that the job needs, without spares and elastic nodes."""
    job = spec(min_nodes=min_nodes, spares=3)
    assert rendered("volcano-job", job=job).workload["spec"]["minAvailable"] == least
    policy = rendered("ascendjob", job=job).workload["spec"]["runPolicy"]["schedulingPolicy"]
    assert policy["minAvailable"] == least
    run = rendered("pytorchjob", job=job).workload["spec"]["runPolicy"]
    assert "schedulingPolicy" not in run
    run = rendered("pytorchjob", job=job, gang=True).workload["spec"]["runPolicy"]
    assert run["schedulingPolicy"] == {"minAvailable": least}
    (runtime,) = rendered("trainjob", job=job, gang=True).beside
    assert runtime["spec"]["podGroupPolicy"] == {"coscheduling": {}}
    assert rendered("volcano-job", job=job, gang=False).workload["spec"]["minAvailable"] == 1


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob", "pytorchjob"])
def test_kueue_holds_the_queue_of_what_volcano_does_not_place(kind: str) -> None:
    """Only the workload has Kueue's label; kinds of Volcano have the queue in their own field."""
    found = rendered(kind, queue="night")
    assert found.workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"
    assert all("kueue.x-k8s.io/queue-name" not in str(one) for one in found.beside)
    assert rendered("volcano-job", queue="night").workload["spec"]["queue"] == "night"
    assert pods(kind).queue == ""
