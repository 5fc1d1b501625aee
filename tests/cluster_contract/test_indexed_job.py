"""Indexed Jobs as a real server was measured to run them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cluster.launch import Cluster

Object = dict[str, Any]

_INDEX = "batch.kubernetes.io/job-completion-index"


def job(name: str, script: str, ranks: int = 3, **spec: Any) -> Object:
    """An Indexed Job whose ranks run this shell script."""
    container = {"name": "main", "image": "busybox", "command": ["sh", "-c", script]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    template["spec"]["terminationGracePeriodSeconds"] = 5
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": ranks,
            "parallelism": ranks,
            "backoffLimit": 6,
            "template": template,
            **spec,
        },
    }


class Space:
    """A namespace with the words of these tests."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.pods = f"/api/v1/namespaces/{name}/pods"
        self.jobs = f"/apis/batch/v1/namespaces/{name}/jobs"

    def start(self, wanted: Object) -> Object:
        return self.cluster.create(self.jobs, wanted)

    def running(self, ranks: int = 3, besides: tuple[str, ...] = ()) -> dict[int, Object]:
        """The pod of each index, once all run."""

        def holds(found: dict[str, Object]) -> dict[int, Object] | None:
            them = {
                int(pod["metadata"]["labels"][_INDEX]): pod
                for pod in found.values()
                if pod["status"]["phase"] == "Running"
                and "deletionTimestamp" not in pod["metadata"]
                and pod["metadata"]["uid"] not in besides
            }
            return them if len(them) == ranks else None

        found: dict[int, Object] = self.cluster.until(self.pods, holds)
        return found

    def ended(self, name: str, timeout: float = 30) -> Object:
        """The condition that ends the job, and its status."""

        def holds(found: dict[str, Object]) -> Object | None:
            for each in found[name].get("status", {}).get("conditions") or []:
                if each["type"] in ("Complete", "Failed") and each["status"] == "True":
                    return {**found[name]["status"], "end": each["type"], "why": each["reason"]}
            return None

        found: Object = self.cluster.until(self.jobs, holds, timeout)
        return found


@pytest.fixture
def space(shared_cluster: Cluster, namespace: str) -> Space:
    return Space(shared_cluster, namespace)


def test_ranks_know_who_they_are(space: Space) -> None:
    """Label, annotation, variable, hostname and finalizer of each rank."""
    made = space.start(job("train", "exec sleep 60"))
    for index, pod in space.running().items():
        metadata = pod["metadata"]
        assert metadata["labels"]["batch.kubernetes.io/job-name"] == "train"
        assert metadata["labels"]["batch.kubernetes.io/controller-uid"] == made["metadata"]["uid"]
        assert metadata["annotations"][_INDEX] == str(index)
        assert metadata["finalizers"] == ["batch.kubernetes.io/job-tracking"]
        assert metadata["name"].startswith(f"train-{index}-")
        assert pod["spec"]["hostname"] == f"train-{index}"
        names = [each["name"] for each in pod["spec"]["containers"][0]["env"]]
        assert "JOB_COMPLETION_INDEX" in names


def test_a_job_of_successes_is_complete(space: Space) -> None:
    """All indexes are in completedIndexes, and no failure is counted."""
    space.start(job("train", 'test "$HOSTNAME" = train-$JOB_COMPLETION_INDEX'))
    status = space.ended("train")
    assert (status["end"], status["why"]) == ("Complete", "CompletionsReached")
    assert status["completedIndexes"] == "0-2"
    assert status["succeeded"] == 3
    assert status.get("failed", 0) == 0


def test_a_failed_rank_comes_back_after_the_back_off(space: Space) -> None:
    """10 s after the first failure; the others keep their pods."""
    script = (
        'test -n "$STAY" || test $JOB_COMPLETION_INDEX != 1 || { sleep 1; exit 1; }; exec sleep 60'
    )
    space.start(job("train", script))
    first = space.running()
    failed = first[1]["metadata"]["uid"]
    space.cluster.until(
        space.pods, lambda found: any(pod["status"]["phase"] == "Failed" for pod in found.values())
    )
    began = time.monotonic()
    second = space.running(besides=(failed,))
    took = time.monotonic() - began
    assert space.cluster.scaled(8) < took < space.cluster.scaled(10) + 3
    assert second[0]["metadata"]["uid"] == first[0]["metadata"]["uid"]
    assert second[1]["metadata"]["uid"] != failed


def test_a_deleted_pod_counts_as_failed(space: Space) -> None:
    """Its index comes back after the back-off, and `failed` is one more."""
    space.start(job("train", "exec sleep 60"))
    first = space.running()
    gone = first[2]["metadata"]
    began = time.monotonic()
    space.cluster.delete(f"{space.pods}/{gone['name']}")
    space.running(besides=(gone["uid"],))
    assert time.monotonic() - began > space.cluster.scaled(8)
    assert space.cluster.get(f"{space.jobs}/train")["status"]["failed"] == 1


def test_beyond_the_limit_the_job_fails(space: Space) -> None:
    """With a backoffLimit of 0 the first failure ends all ranks."""
    script = "test $JOB_COMPLETION_INDEX != 0 || exit 7; exec sleep 60"
    space.start(job("train", script, backoffLimit=0))
    status = space.ended("train")
    assert (status["end"], status["why"]) == ("Failed", "BackoffLimitExceeded")
    assert status["failed"] == 1
    space.cluster.until(
        space.pods, lambda found: [pod["status"]["phase"] for pod in found.values()] == ["Failed"]
    )


def test_a_failure_policy_ends_the_job_by_exit_code(space: Space) -> None:
    """FailJob names pod, code and rule."""
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    space.start(job("train", "exit 42", ranks=1, podFailurePolicy={"rules": [rule]}))
    status = space.ended("train")
    assert status["why"] == "PodFailurePolicy"
    message = next(each["message"] for each in status["conditions"] if each["type"] == "Failed")
    assert "failed with exit code 42 matching FailJob rule at index 0" in message


def test_suspended_and_resumed_a_job_waits_for_no_back_off(space: Space) -> None:
    """The template's affinity may change in between; the uid stays, nothing counts as failed."""
    made = space.start(job("train", "exec sleep 60"))
    first = space.running()
    path = f"{space.jobs}/train"
    space.cluster.patch(path, {"spec": {"suspend": True}})

    def is_idle(found: dict[str, Object]) -> bool:
        status = found["train"]["status"]
        suspended = [each for each in status["conditions"] if each["type"] == "Suspended"]
        return bool(suspended and suspended[0]["status"] == "True" and not status.get("active"))

    space.cluster.until(space.jobs, is_idle)
    taken = first[0]["spec"]["nodeName"]
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [taken]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    space.cluster.patch(path, {"spec": {"template": {"spec": {"affinity": affinity}}}})
    began = time.monotonic()
    space.cluster.patch(path, {"spec": {"suspend": False}})
    uids = tuple(pod["metadata"]["uid"] for pod in first.values())
    second = space.running(besides=uids)
    assert time.monotonic() - began < 5
    assert taken not in {pod["spec"]["nodeName"] for pod in second.values()}
    now = space.cluster.get(path)
    assert now["metadata"]["uid"] == made["metadata"]["uid"]
    assert now["status"].get("failed", 0) == 0
