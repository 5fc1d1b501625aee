"""Indexed Jobs as a real server was measured to run them."""

from __future__ import annotations

import time
from typing import Any

from cluster.manifests import job
from cluster.spaces import INDEX, Space, uids

Object = dict[str, Any]


def ended(space: Space, name: str) -> Object:
    """The status of the job, with the condition that ends it."""
    found = space.condition(space.jobs, name, "Complete", "Failed")
    return {**space.status(space.jobs, name), "end": found["type"], "why": found["reason"]}


def test_ranks_know_who_they_are(space: Space) -> None:
    """Label, annotation, variable, hostname and finalizer of each rank."""
    made = space.cluster.create(space.jobs, job("train", "exec sleep 60"))
    for index, pod in space.ranks().items():
        metadata = pod["metadata"]
        assert metadata["labels"]["batch.kubernetes.io/job-name"] == "train"
        assert metadata["labels"]["batch.kubernetes.io/controller-uid"] == made["metadata"]["uid"]
        assert metadata["annotations"][INDEX] == str(index)
        assert metadata["finalizers"] == ["batch.kubernetes.io/job-tracking"]
        assert metadata["name"].startswith(f"train-{index}-")
        assert pod["spec"]["hostname"] == f"train-{index}"
        names = [each["name"] for each in pod["spec"]["containers"][0]["env"]]
        assert "JOB_COMPLETION_INDEX" in names


def test_a_job_of_successes_is_complete(space: Space) -> None:
    """All indexes are in completedIndexes, and no failure is counted."""
    space.cluster.create(space.jobs, job("train", 'test "$HOSTNAME" = train-$JOB_COMPLETION_INDEX'))
    status = ended(space, "train")
    assert (status["end"], status["why"]) == ("Complete", "CompletionsReached")
    assert status["completedIndexes"] == "0-2"
    assert status["succeeded"] == 3
    assert status.get("failed", 0) == 0


def test_a_failed_rank_comes_back_after_the_back_off(space: Space) -> None:
    """10 s after the first failure; the others keep their pods."""
    script = (
        'test -n "$STAY" || test $JOB_COMPLETION_INDEX != 1 || { sleep 1; exit 1; }; exec sleep 60'
    )
    space.cluster.create(space.jobs, job("train", script))
    first = space.ranks()
    failed = first[1]["metadata"]["uid"]
    space.cluster.until(
        space.pods, lambda found: any(pod["status"]["phase"] == "Failed" for pod in found.values())
    )
    began = time.monotonic()
    second = space.ranks(besides=(failed,))
    took = time.monotonic() - began
    assert space.cluster.scaled(8) < took < space.cluster.scaled(10) + 3
    assert second[0]["metadata"]["uid"] == first[0]["metadata"]["uid"]
    assert second[1]["metadata"]["uid"] != failed


def test_a_deleted_pod_counts_as_failed(space: Space) -> None:
    """Its index comes back after the back-off, and `failed` is one more."""
    space.cluster.create(space.jobs, job("train", "exec sleep 60"))
    first = space.ranks()
    gone = first[2]["metadata"]
    began = time.monotonic()
    space.cluster.delete(f"{space.pods}/{gone['name']}")
    space.ranks(besides=(gone["uid"],))
    assert time.monotonic() - began > space.cluster.scaled(8)
    assert space.cluster.get(f"{space.jobs}/train")["status"]["failed"] == 1


def test_beyond_the_limit_the_job_fails(space: Space) -> None:
    """With a backoffLimit of 0 the first failure ends all ranks."""
    script = "test $JOB_COMPLETION_INDEX != 0 || exit 7; exec sleep 60"
    space.cluster.create(space.jobs, job("train", script, backoffLimit=0))
    status = ended(space, "train")
    assert (status["end"], status["why"]) == ("Failed", "BackoffLimitExceeded")
    assert status["failed"] == 1
    space.cluster.until(
        space.pods, lambda found: [pod["status"]["phase"] for pod in found.values()] == ["Failed"]
    )


def test_suspended_and_resumed_a_job_waits_for_no_back_off(space: Space) -> None:
    """The template's affinity may change in between; the uid stays, nothing counts as failed."""
    made = space.cluster.create(space.jobs, job("train", "exec sleep 60"))
    first = space.ranks()
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
    second = space.ranks(besides=uids(first))
    assert time.monotonic() - began < 5
    assert taken not in {pod["spec"]["nodeName"] for pod in second.values()}
    now = space.cluster.get(path)
    assert now["metadata"]["uid"] == made["metadata"]["uid"]
    assert now["status"].get("failed", 0) == 0


def test_the_second_failure_waits_twice_as_long(space: Space) -> None:
    """10 s, then 20 s."""
    space.cluster.create(space.jobs, job("train", ranks=1))
    taken = []
    gone: tuple[str, ...] = ()
    for _ in range(2):
        found = space.ranks(1, besides=gone)
        gone += uids(found)
        space.cluster.delete(f"{space.pods}/{found[0]['metadata']['name']}")
        began = time.monotonic()
        space.ranks(1, besides=gone)
        taken.append(time.monotonic() - began)
    assert taken[0] > space.cluster.scaled(8)
    assert taken[1] > space.cluster.scaled(18)


def test_a_job_grows_and_shrinks(space: Space) -> None:
    """completions and parallelism together."""
    space.cluster.create(space.jobs, job("train", ranks=2))
    first = space.ranks(2)
    path = f"{space.jobs}/train"
    space.cluster.patch(path, {"spec": {"completions": 4, "parallelism": 4}})
    second = space.ranks(4)
    assert uids(first) == uids({index: second[index] for index in first})
    space.cluster.patch(path, {"spec": {"completions": 1, "parallelism": 1}})
    third = space.ranks(1)
    assert list(third) == [0]
    assert space.status(space.jobs, "train").get("failed", 0) == 0


def test_a_job_made_anew_under_its_name(space: Space) -> None:
    """Deleted in the foreground, created again: no back-off, another uid."""
    made = space.cluster.create(space.jobs, job("train"))
    first = space.ranks()
    began = time.monotonic()
    space.cluster.delete(f"{space.jobs}/train", propagationPolicy="Foreground")
    space.cluster.until(space.jobs, lambda found: not found)
    again = space.cluster.create(space.jobs, job("train"))
    space.ranks(besides=uids(first))
    assert time.monotonic() - began < 10
    assert again["metadata"]["uid"] != made["metadata"]["uid"]


def test_a_finished_job_goes_after_its_time(space: Space) -> None:
    """With its pods."""
    space.cluster.create(space.jobs, job("train", "true", ranks=1, ttlSecondsAfterFinished=1))
    space.condition(space.jobs, "train", "Complete")
    space.cluster.until(space.jobs, lambda found: not found)
    space.cluster.until(space.pods, lambda found: not found)


def test_in_place_restarts_count(space: Space) -> None:
    """restartPolicy OnFailure: the pod stays, and at the limit the job fails."""
    wanted = job("train", "exit 1", ranks=1, backoffLimit=1)
    wanted["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    space.cluster.create(space.jobs, wanted)
    assert ended(space, "train")["why"] == "BackoffLimitExceeded"
