"""JobSets as they were measured."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.manifests import jobset
from cluster.spaces import Space, uids

Object = dict[str, Any]

_LABELS = "jobset.sigs.k8s.io/"
_GROUP = "jobset.x-k8s.io/v1alpha2"
# Fails once: in the first attempt of the first pod of the second Job.
_FAILS = 'test "$ATTEMPT$JOB$JOB_COMPLETION_INDEX" != 010 || exit 1; exec sleep 60'


@pytest.fixture
def sets(space: Space) -> str:
    if not space.has(_GROUP):
        pytest.skip("this cluster has no JobSets")
    return space.path(_GROUP, "jobsets")


def failing(name: str, attempt: str = "restart-attempt", **policy: Any) -> Object:
    """One whose first attempt fails."""
    wanted = jobset(name, _FAILS, failurePolicy={"maxRestarts": 2, **policy})
    template = wanted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    template["containers"][0]["env"] = [
        {
            "name": variable,
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_LABELS}{label}']"}},
        }
        for variable, label in (("ATTEMPT", attempt), ("JOB", "job-index"))
    ]
    return wanted


def test_what_it_makes(space: Space, sets: str) -> None:
    """Jobs and pods with their labels, a headless service, a status."""
    made = space.cluster.create(sets, jobset("train"))
    pods = space.running(4)
    for name, pod in pods.items():
        labels = pod["metadata"]["labels"]
        assert labels[_LABELS + "jobset-name"] == "train"
        assert labels[_LABELS + "jobset-uid"] == made["metadata"]["uid"]
        assert labels[_LABELS + "replicatedjob-name"] == "w"
        assert labels[_LABELS + "restart-attempt"] == "0"
        assert pod["spec"]["subdomain"] == "train"
        assert name.startswith(pod["spec"]["hostname"])
    numbers = {pod["metadata"]["labels"][_LABELS + "job-global-index"] for pod in pods.values()}
    assert numbers == {"0", "1"}
    jobs = {each["metadata"]["name"] for each in space.cluster.get(space.jobs)["items"]}
    assert jobs == {"train-w-0", "train-w-1"}
    space.cluster.until(
        sets,
        lambda found: found["train"]["status"]["replicatedJobsStatus"][0].get("ready") == 2,
    )


def test_all_jobs_complete(space: Space, sets: str) -> None:
    """Completed, and the terminal state says so."""
    space.cluster.create(sets, jobset("train", "true"))
    found = space.condition(sets, "train", "Completed", "Failed")
    assert (found["type"], found["reason"]) == ("Completed", "AllJobsCompleted")
    assert space.status(sets, "train")["terminalState"] == "Completed"


@pytest.mark.parametrize("strategy", ["Recreate", "BlockingRecreate"])
def test_a_failure_makes_all_jobs_anew(space: Space, sets: str, strategy: str) -> None:
    """No back-off; the attempt is in the labels."""
    space.cluster.create(sets, failing("train", restartStrategy=strategy))

    def are_anew(found: dict[str, Object]) -> bool:
        attempts = [
            pod["metadata"]["labels"][_LABELS + "restart-attempt"]
            for pod in found.values()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return attempts == ["1"] * 4

    space.cluster.until(space.pods, are_anew)
    status = space.status(sets, "train")
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 1)


def test_without_a_policy_the_first_failure_is_the_end(space: Space, sets: str) -> None:
    """FailedJobs, with the job that was the first."""
    wanted = failing("train")
    del wanted["spec"]["failurePolicy"]
    space.cluster.create(sets, wanted)
    found = space.condition(sets, "train", "Completed", "Failed")
    assert (found["type"], found["reason"]) == ("Failed", "FailedJobs")
    assert "train-w-1" in found["message"]


def test_there_are_only_so_many_restarts(space: Space, sets: str) -> None:
    """ReachedMaxRestarts."""
    wanted = jobset("train", "exit 1", failurePolicy={"maxRestarts": 1})
    space.cluster.create(sets, wanted)
    found = space.condition(sets, "train", "Completed", "Failed")
    assert found["reason"] == "ReachedMaxRestarts"
    assert space.status(sets, "train")["restarts"] == 1


def test_a_rule_may_fail_it(space: Space, sets: str) -> None:
    """By the reason of the job's failure."""
    rule = {
        "name": "end",
        "action": "FailJobSet",
        "onJobFailureReasons": ["BackoffLimitExceeded"],
    }
    space.cluster.create(sets, failing("train", rules=[rule]))
    found = space.condition(sets, "train", "Completed", "Failed")
    assert found["reason"] == "FailJobSetFailurePolicyAction"


@pytest.mark.simulated  # an alpha feature that is off elsewhere
def test_one_job_alone_is_made_anew(space: Space, sets: str) -> None:
    """RestartJob: the pods of the others stay as they are."""
    rules = [{"name": "one", "action": "RestartJob"}]
    space.cluster.create(sets, failing("train", "job-restart-attempt", rules=rules))

    def is_anew(found: dict[str, Object]) -> dict[str, Object] | None:
        running = {
            name: pod
            for name, pod in found.items()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }
        attempts = {
            name: pod["metadata"]["labels"][_LABELS + "job-restart-attempt"]
            for name, pod in running.items()
        }
        return running if sorted(attempts.values()) == ["0", "0", "1", "1"] else None

    space.cluster.until(space.pods, is_anew)
    status = space.status(sets, "train")
    assert status["restarts"] == 0
    assert status["replicatedJobsStatus"][0]["jobRestarts"] == [0, 1]


def test_suspended_it_may_be_sent_elsewhere(space: Space, sets: str) -> None:
    """nodeSelector may change, affinity may not; no back-off after that."""
    space.cluster.create(sets, jobset("train"))
    first = space.running(4)
    path = f"{sets}/train"
    selector = {"kubernetes.io/os": "linux"}

    def changed(**fields: object) -> dict[str, object]:
        jobs = space.cluster.get(path)["spec"]["replicatedJobs"]
        jobs[0]["template"]["spec"]["template"]["spec"] |= fields
        return {"spec": {"replicatedJobs": jobs}}

    kind = "application/merge-patch+json"
    assert space.cluster.call("PATCH", path, changed(nodeSelector=selector), kind)[0] == 422
    space.cluster.patch(path, {"spec": {"suspend": True}})
    space.condition(sets, "train", "Suspended")
    space.cluster.until(space.pods, lambda found: not found)
    affinity = changed(affinity={"nodeAffinity": {}})
    code, answer = space.cluster.call("PATCH", path, affinity, kind)
    assert (code, answer["reason"]) == (422, "Invalid")
    space.cluster.patch(path, changed(nodeSelector=selector))
    space.cluster.patch(path, {"spec": {"suspend": False}})
    second = space.running(4, besides=uids(first))
    assert all(pod["spec"]["nodeSelector"] == selector for pod in second.values())


def test_deleted_it_takes_all_with_it(space: Space, sets: str) -> None:
    """In the foreground: the name is free once all is gone."""
    space.cluster.create(sets, jobset("train"))
    space.running(4)
    space.cluster.delete(f"{sets}/train", propagationPolicy="Foreground")
    space.cluster.until(sets, lambda found: not found)
    space.cluster.until(space.jobs, lambda found: not found)
    space.cluster.until(space.pods, lambda found: not found)
