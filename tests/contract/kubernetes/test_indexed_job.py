"""Test that Indexed Jobs behave as measured on a real server."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import Any

from cluster.manifests import job
from cluster.spaces import INDEX, Space, uids
from waiting import bound_s, wait_until

Object = dict[str, Any]


def ended(space: Space, name: str) -> Object:
    """Return the status of an ended Job, with the type and reason of its final condition."""
    found = space.condition(space.jobs, name, "Complete", "Failed")
    return {**space.status(space.jobs, name), "end": found["type"], "why": found["reason"]}


def times(space: Space, pod: Object) -> list[float]:
    """Return the times of the lines in a pod's log, in seconds, as its node recorded them."""
    path = f"{space.pods}/{pod['metadata']['name']}/log?timestamps=true"

    def lines() -> list[str]:
        code, text = space.cluster.call("GET", path)
        return str(text).splitlines() if code == 200 else []

    printed = wait_until(lines, f"a line of {path}", pause_s=0.05)
    return [_seconds(line.split(" ")[0]) for line in printed]


def _seconds(stamp: str) -> float:
    """Return the seconds since 1970 of a UTC time with any number of decimals."""
    whole, _, decimals = stamp.removesuffix("Z").partition(".")
    at = datetime.datetime.fromisoformat(f"{whole}+00:00")
    return at.timestamp() + float(f"0.{decimals or 0}")


def at_least(space: Space, back_off_s: float) -> float:
    """Return the minimum length of a back-off here, in seconds.

    A real server counts a back-off in whole seconds, so it can be one second shorter.
    """
    return space.cluster.scaled(back_off_s - 1)


def active_at_first(space: Space, since: Object) -> int:
    """Return the number of active ranks in the first state after `since` with a started Job."""
    query = f"watch=1&resourceVersion={since['metadata']['resourceVersion']}"
    for _, found in space.cluster._events(f"{space.jobs}?{query}", bound_s()):
        status = found.get("status") or {}
        suspended = [
            e["status"] for e in status.get("conditions") or [] if e["type"] == "Suspended"
        ]
        if "startTime" in status and suspended != ["True"]:
            return int(status.get("active") or 0)
    raise AssertionError("it has not started")


def test_ranks_know_who_they_are(space: Space) -> None:
    """Each pod has the label, annotation, variable, hostname and finalizer of its rank."""
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
    """If all pods succeed, the Job is Complete, with all indexes and without a failure."""
    space.cluster.create(space.jobs, job("train", 'test "$HOSTNAME" = train-$JOB_COMPLETION_INDEX'))
    status = ended(space, "train")
    assert (status["end"], status["why"]) == ("Complete", "CompletionsReached")
    assert status["completedIndexes"] == "0-2"
    assert status["succeeded"] == 3
    assert status.get("failed", 0) == 0


def test_a_failed_rank_comes_back_after_the_back_off(space: Space) -> None:
    """A failed rank gets a new pod 10 s after its first failure. Other ranks keep their pods."""
    fails = "test $JOB_COMPLETION_INDEX != 1 || { sleep 1; echo fails; exit 1; }"
    script = f"echo runs; {fails}; exec sleep 60"
    space.cluster.create(space.jobs, job("train", script))
    first = space.ranks()
    failed = first[1]["metadata"]["uid"]
    second = space.ranks(besides=(failed,))
    assert times(space, second[1])[0] - times(space, first[1])[-1] >= at_least(space, 10)
    assert second[0]["metadata"]["uid"] == first[0]["metadata"]["uid"]
    assert second[1]["metadata"]["uid"] != failed


def test_a_deleted_pod_counts_as_failed(space: Space) -> None:
    """A deleted pod counts as failed: its index gets a new pod after the back-off."""
    script = "while :; do echo runs; sleep 0.05; done"
    space.cluster.create(space.jobs, job("train", script))
    first = space.ranks()
    gone = first[2]["metadata"]
    ran = times(space, first[2])[-1]
    space.cluster.delete(f"{space.pods}/{gone['name']}")
    second = space.ranks(besides=(gone["uid"],))
    assert times(space, second[2])[0] - ran >= at_least(space, 10)
    assert space.cluster.get(f"{space.jobs}/train")["status"]["failed"] == 1


def test_beyond_the_limit_the_job_fails(space: Space) -> None:
    """With a backoffLimit of 0, the first failure fails the Job and ends all ranks."""
    script = "test $JOB_COMPLETION_INDEX != 0 || exit 7; exec sleep 60"
    space.cluster.create(space.jobs, job("train", script, backoffLimit=0))
    status = ended(space, "train")
    assert (status["end"], status["why"]) == ("Failed", "BackoffLimitExceeded")
    assert status["failed"] == 1
    space.cluster.until(
        space.pods, lambda found: [pod["status"]["phase"] for pod in found.values()] == ["Failed"]
    )


def test_suspended_and_resumed_a_job_waits_for_no_back_off(space: Space) -> None:
    """A resumed Job starts its pods without a back-off, with the same uid and no failure.

    The affinity of a suspended Job's template can change.
    """
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
    resumed = space.cluster.patch(path, {"spec": {"suspend": False}})
    assert active_at_first(space, resumed) == 3
    second = space.ranks(besides=uids(first))
    assert taken not in {pod["spec"]["nodeName"] for pod in second.values()}
    now = space.cluster.get(path)
    assert now["metadata"]["uid"] == made["metadata"]["uid"]
    assert now["status"].get("failed", 0) == 0


def test_the_second_failure_waits_twice_as_long(space: Space) -> None:
    """The first failure of a rank delays the next pod by 10 s, the second by 20 s."""
    space.cluster.create(space.jobs, job("train", "echo fails; exit 1", ranks=1))

    def failed(found: dict[str, Object]) -> list[Object] | None:
        pods = [pod for pod in found.values() if pod["status"]["phase"] == "Failed"]
        return pods if len(pods) == 3 else None

    runs = sorted(times(space, pod)[0] for pod in space.cluster.until(space.pods, failed))
    for (before, after), back_off_s in zip(pairwise(runs), (10, 20), strict=True):
        assert after - before >= at_least(space, back_off_s)


def test_a_job_grows_and_shrinks(space: Space) -> None:
    """A Job changes its size if completions and parallelism change together.

    Remaining ranks keep their pods.
    """
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
    """A Job that is deleted in the foreground and created again starts without a back-off.

    It has another uid.
    """
    made = space.cluster.create(space.jobs, job("train"))
    first = space.ranks()
    space.cluster.delete(f"{space.jobs}/train", propagationPolicy="Foreground")
    space.cluster.until(space.jobs, lambda found: not found)
    again = space.cluster.create(space.jobs, job("train"))
    assert active_at_first(space, again) == 3
    space.ranks(besides=uids(first))
    assert again["metadata"]["uid"] != made["metadata"]["uid"]


def test_a_finished_job_goes_after_its_time(space: Space) -> None:
    """The server deletes a finished Job and its pods after ttlSecondsAfterFinished."""
    space.cluster.create(space.jobs, job("train", "true", ranks=1, ttlSecondsAfterFinished=1))
    space.condition(space.jobs, "train", "Complete")
    space.cluster.until(space.jobs, lambda found: not found)
    space.cluster.until(space.pods, lambda found: not found)


def test_in_place_restarts_count(space: Space) -> None:
    """With restartPolicy OnFailure, restarts in the pod count towards the backoffLimit.

    At the limit, the Job fails.
    """
    wanted = job("train", "exit 1", ranks=1, backoffLimit=1)
    wanted["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    space.cluster.create(space.jobs, wanted)
    assert ended(space, "train")["why"] == "BackoffLimitExceeded"
