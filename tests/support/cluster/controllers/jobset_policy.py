"""What the failure of a Job means for its JobSet, and when it has succeeded."""

from __future__ import annotations

import re

from cluster.controllers.loop import condition
from cluster.refusals import Object

_NAME = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "jobset.sigs.k8s.io/job-index"


def judge(jobset: Object, job: Object, failed: Object) -> str:
    """The action; empty without a failure policy."""
    policy = jobset["spec"].get("failurePolicy")
    if policy is None:
        return ""
    for rule in policy.get("rules") or []:
        reasons = rule.get("onJobFailureReasons")
        patterns = rule.get("onJobFailureMessagePatterns")
        targets = rule.get("targetReplicatedJobs")
        if reasons and failed["reason"] not in reasons:
            continue
        if patterns and not any(re.search(each, failed["message"]) for each in patterns):
            continue
        if targets and job["metadata"]["labels"][_NAME] not in targets:
            continue
        return str(rule["action"])
    return "RestartJobSet"


def count(jobset: Object, status: Object, job: Object, action: str) -> bool:
    """Count a restart of all or of one; False if there were as many as may be."""
    limit = jobset["spec"]["failurePolicy"]["maxRestarts"]
    ignores = action.endswith("IgnoreMaxRestarts")
    if action.startswith("RestartJobSet"):
        if not ignores:
            if status.get("restartsCountTowardsMax", 0) >= limit:
                return False
            status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + 1
        status["restarts"] += 1
        return True
    labels = job["metadata"]["labels"]
    index = int(labels[_INDEX])
    for each in status["replicatedJobsStatus"]:
        if each["name"] == labels[_NAME]:
            towards = _at_least(each.get("jobRestartsCountTowardsMax"), index)
            if not ignores:
                if towards[index] >= limit:
                    return False
                towards[index] += 1
            each["jobRestartsCountTowardsMax"] = towards
            each["jobRestarts"] = _at_least(each.get("jobRestarts"), index)
            each["jobRestarts"][index] += 1
    return True


def job_restarts(status: Object, name: str, index: int) -> int:
    """How often this Job alone was made anew."""
    for each in status.get("replicatedJobsStatus") or []:
        restarts = each.get("jobRestarts") or []
        if each["name"] == name and index < len(restarts):
            return int(restarts[index])
    return 0


def has_succeeded(jobset: Object, jobs: list[Object]) -> bool:
    policy = jobset["spec"]["successPolicy"]
    targets = policy.get("targetReplicatedJobs")
    wanted = [
        each["replicas"]
        for each in jobset["spec"]["replicatedJobs"]
        if not targets or each["name"] in targets
    ]
    done = sum(
        1
        for job in jobs
        if condition(job, "Complete")
        and (not targets or job["metadata"]["labels"][_NAME] in targets)
    )
    return done >= 1 if policy.get("operator") == "Any" else done >= sum(wanted)


def _at_least(counts: list[int] | None, index: int) -> list[int]:
    found = list(counts or [])
    return found + [0] * (index + 1 - len(found))
