"""Volcano's Jobs and Commands, as their sources have them."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.manifests import volcano_command, volcano_job
from cluster.spaces import Space, uids

Object = dict[str, Any]
pytestmark = pytest.mark.simulated

_RESTART = [{"event": "PodEvicted", "action": "RestartJob"}]


@pytest.fixture
def volcano(space: Space) -> str:
    return space.path("batch.volcano.sh/v1alpha1", "jobs")


def phase(space: Space, volcano: str, *wanted: str) -> Object:
    """The status, once the phase is one of these."""

    def holds(found: dict[str, Object]) -> Object | None:
        status = found["train"].get("status") or {}
        return status if status.get("state", {}).get("phase") in wanted else None

    found: Object = space.cluster.until(volcano, holds)
    return found


def test_pods_of_tasks(space: Space, volcano: str) -> None:
    """Names, labels, and the phases up to the end."""
    space.cluster.create(volcano, volcano_job("train", "sleep 1", plugins={"env": []}))
    pods = space.running()
    assert set(pods) == {"train-w-0", "train-w-1", "train-w-2"}
    labels = pods["train-w-1"]["metadata"]["labels"]
    assert labels["volcano.sh/job-name"] == "train"
    assert (labels["volcano.sh/task-spec"], labels["volcano.sh/task-index"]) == ("w", "1")
    assert pods["train-w-1"]["metadata"]["annotations"]["volcano.sh/job-version"] == "0"
    phase(space, volcano, "Running")
    assert phase(space, volcano, "Completed")["succeeded"] == 3


def test_a_deleted_pod_alone_comes_again(space: Space, volcano: str) -> None:
    """Without a policy: the same name, no retry counted."""
    space.cluster.create(volcano, volcano_job("train"))
    first = space.running()
    space.cluster.delete(f"{space.pods}/train-w-1")
    second = space.running(besides=(first["train-w-1"]["metadata"]["uid"],))
    assert second["train-w-0"]["metadata"]["uid"] == first["train-w-0"]["metadata"]["uid"]
    assert space.status(volcano, "train").get("retryCount", 0) == 0


def test_an_evicted_pod_may_restart_the_job(space: Space, volcano: str) -> None:
    """PodEvicted with RestartJob: all pods anew, a version and a retry later."""
    space.cluster.create(volcano, volcano_job("train", policies=_RESTART))
    first = space.running()
    space.cluster.delete(f"{space.pods}/train-w-1")
    second = space.running(besides=uids(first))
    versions = {p["metadata"]["annotations"]["volcano.sh/job-version"] for p in second.values()}
    assert versions == {"1"}
    assert phase(space, volcano, "Running")["retryCount"] == 1


def test_every_restart_counts(space: Space, volcano: str) -> None:
    """RestartPod, too: with maxRetry 2 the second is the end."""
    policies = [{"event": "PodFailed", "action": "RestartPod"}]
    script = 'test "$VC_TASK_INDEX" != 0 || exit 1; exec sleep 60'
    wanted = volcano_job("train", script, policies=policies, maxRetry=2, plugins={"env": []})
    space.cluster.create(volcano, wanted)
    assert phase(space, volcano, "Failed")["retryCount"] == 2


def test_a_task_has_policies_of_its_own(space: Space, volcano: str) -> None:
    """They come before those of the job."""
    wanted = volcano_job("train", "exit 3", policies=[{"event": "*", "action": "RestartJob"}])
    wanted["spec"]["tasks"][0]["policies"] = [{"exitCode": 3, "action": "AbortJob"}]
    space.cluster.create(volcano, wanted)
    assert phase(space, volcano, "Aborted", "Failed").get("retryCount", 0) == 0


def test_failed_pods_without_a_policy(space: Space, volcano: str) -> None:
    """They stay, and once all have ended the job is Failed."""
    script = 'test "$VC_TASK_INDEX" != 0 || exit 1'
    space.cluster.create(volcano, volcano_job("train", script, plugins={"env": []}))
    status = phase(space, volcano, "Failed", "Completed")
    assert (status["state"]["phase"], status["failed"], status["succeeded"]) == ("Failed", 1, 2)


def test_commands(space: Space, volcano: str) -> None:
    """Each is consumed once: restart, abort, resume, terminate."""
    made = space.cluster.create(volcano, volcano_job("train", maxRetry=9))
    commands = space.path("bus.volcano.sh/v1alpha1", "commands")
    gone: tuple[str, ...] = ()
    for action, wanted in (
        ("RestartJob", "Running"),
        ("AbortJob", "Aborted"),
        ("ResumeJob", "Running"),
        ("TerminateJob", "Terminated"),
    ):
        if action != "ResumeJob":
            gone += uids(space.running(besides=gone))
            phase(space, volcano, "Running")
        space.cluster.create(commands, volcano_command("order", action, made))
        space.cluster.until(commands, lambda found: not found)
        if wanted == "Running":
            space.running(besides=gone)
        phase(space, volcano, wanted)
    assert phase(space, volcano, "Terminated")["retryCount"] == 2


def test_the_spec_is_fixed(space: Space, volcano: str) -> None:
    """But for minAvailable and the replicas of tasks."""
    space.cluster.create(volcano, volcano_job("train"))
    space.running()
    path = f"{volcano}/train"
    kind = "application/merge-patch+json"
    assert space.cluster.call("PATCH", path, {"spec": {"queue": "other"}}, kind)[0] == 422
    patch = [
        {"op": "replace", "path": "/spec/minAvailable", "value": 2},
        {"op": "replace", "path": "/spec/tasks/0/replicas", "value": 2},
    ]
    space.cluster.patch(path, patch)
    assert set(space.running(2)) == {"train-w-0", "train-w-1"}
