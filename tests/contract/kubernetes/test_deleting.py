"""Test deletions: preconditions, propagation policies, finalizers and grace periods."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.client import Cluster
from cluster.manifests import config_map, job, pod
from kubernetes import client
from kubernetes.client import ApiException
from waiting import bound_s, wait_until

Object = dict[str, Any]


@pytest.fixture
def jobs(shared_cluster: Cluster, namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


@pytest.fixture
def pods(shared_cluster: Cluster, namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def _start(cluster: Cluster, jobs: str, pods: str) -> None:
    cluster.create(jobs, job("train"))
    cluster.until(
        pods,
        lambda found: (
            len(found) == 3 and all(each["status"]["phase"] == "Running" for each in found.values())
        ),
    )


def _until_trapped(cluster: Cluster, pods: str) -> None:
    """Wait until the log of the pod `one` reports that its signal handlers are set."""
    path = f"{pods}/one/log"
    wait_until(lambda: cluster.call("GET", path) == (200, "trapped\n"), "the trap", pause_s=0.05)


def _states(cluster: Cluster, pods: str, since: Object) -> list[Object]:
    """Return the states of the pod `one` after the given state, up to its deletion."""
    query = f"watch=1&resourceVersion={since['metadata']['resourceVersion']}"
    found = []
    for kind, thing in cluster._events(f"{pods}?{query}", bound_s()):
        if thing["metadata"]["uid"] == since["metadata"]["uid"]:
            found.append(thing)
            if kind == "DELETED":
                return found
    raise AssertionError(f"it is not gone: {found}")


def _exit_code(thing: Object) -> int | None:
    """Return the exit code of a pod's only container, or None while it runs."""
    state = thing["status"]["containerStatuses"][0]["state"]
    return int(state["terminated"]["exitCode"]) if "terminated" in state else None


def test_a_wrong_uid_is_a_conflict(shared_cluster: Cluster, jobs: str) -> None:
    """If the uid in a precondition differs, a deletion gets 409 and the object stays."""
    made = shared_cluster.create(jobs, job("train", ranks=0))
    options = {"preconditions": {"uid": "another"}, "propagationPolicy": "Background"}
    code, answer = shared_cluster.call("DELETE", f"{jobs}/train", options)
    assert (code, answer["reason"]) == (409, "Conflict")
    assert "UID in the precondition" in answer["message"]
    options["preconditions"] = {"uid": made["metadata"]["uid"]}
    assert shared_cluster.call("DELETE", f"{jobs}/train", options)[0] == 200


def test_a_job_deleted_without_a_policy_orphans_its_pods(
    shared_cluster: Cluster, namespace: str, jobs: str, pods: str
) -> None:
    """If a Job is deleted without a policy, its pods continue to run without an owner.

    A policy in the query has no effect if the request also has a body.
    """
    _start(shared_cluster, jobs, pods)
    uid = shared_cluster.get(f"{jobs}/train")["metadata"]["uid"]
    body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=uid))
    batch = client.BatchV1Api(shared_cluster.admin)
    batch.delete_namespaced_job("train", namespace, body=body, propagation_policy="Foreground")
    shared_cluster.until(jobs, lambda found: not found)
    shared_cluster.until(
        pods,
        lambda found: (
            len(found) == 3
            and not any(each["metadata"].get("ownerReferences") for each in found.values())
        ),
    )
    for each in shared_cluster.get(pods)["items"]:
        assert each["status"]["phase"] == "Running"
        assert "deletionTimestamp" not in each["metadata"]


def test_in_the_background_the_job_is_gone_first(
    shared_cluster: Cluster, jobs: str, pods: str
) -> None:
    """With the Background policy, the server deletes the Job first and its pods afterwards."""
    _start(shared_cluster, jobs, pods)
    shared_cluster.delete(f"{jobs}/train", propagationPolicy="Background")
    assert shared_cluster.call("GET", f"{jobs}/train")[0] == 404
    shared_cluster.until(pods, lambda found: not found)


def test_in_the_foreground_the_pods_are_gone_first(
    shared_cluster: Cluster, jobs: str, pods: str
) -> None:
    """With the Foreground policy, the Job exists until the server has ended its pods.

    Afterwards another Job can use its name.
    """
    _start(shared_cluster, jobs, pods)
    shared_cluster.delete(f"{jobs}/train", propagationPolicy="Foreground")
    code, found = shared_cluster.call("GET", f"{jobs}/train")
    if code == 200:
        assert found["metadata"]["finalizers"] == ["foregroundDeletion"]
    shared_cluster.until(jobs, lambda found: not found)
    left = shared_cluster.get(pods)["items"]
    assert all("deletionTimestamp" in each["metadata"] for each in left)
    shared_cluster.create(jobs, job("train", ranks=0))


def test_a_finalizer_holds_an_object(shared_cluster: Cluster, namespace: str) -> None:
    """A deleted object with a finalizer exists until a client removes the finalizer."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    wanted = config_map("a")
    wanted["metadata"]["finalizers"] = ["example.com/hold"]
    shared_cluster.create(path, wanted)
    shared_cluster.delete(f"{path}/a")
    assert "deletionTimestamp" in shared_cluster.get(f"{path}/a")["metadata"]
    shared_cluster.patch(f"{path}/a", {"metadata": {"finalizers": None}})
    assert shared_cluster.call("GET", f"{path}/a")[0] == 404


def test_what_has_no_owner_any_more_is_collected(shared_cluster: Cluster, namespace: str) -> None:
    """The server deletes an object if its owner does not exist.

    An owner reference matches by uid, and only within the namespace of the object.
    """
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    owner = shared_cluster.create(path, config_map("owner"))
    for name, uid in (("right", owner["metadata"]["uid"]), ("wrong", "no-such-uid")):
        wanted = config_map(name)
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
        wanted["metadata"]["ownerReferences"] = [reference]
        shared_cluster.create(path, wanted)
    shared_cluster.until(path, lambda found: "wrong" not in found and "right" in found)
    shared_cluster.delete(f"{path}/owner")
    shared_cluster.until(path, lambda found: "right" not in found)


def test_a_pod_has_time_to_end(shared_cluster: Cluster, pods: str) -> None:
    """A deleted pod gets SIGTERM and stays Running until its process has ended.

    Its grace period is longer than the test.
    """
    script = "trap 'sleep 1; exit 3' TERM; echo trapped; while :; do sleep 0.1; done"
    wanted = pod("one", script)
    wanted["spec"]["terminationGracePeriodSeconds"] = 86400
    shared_cluster.create(pods, wanted)
    _until_trapped(shared_cluster, pods)
    before = shared_cluster.get(f"{pods}/one")
    answer = shared_cluster.delete(f"{pods}/one")
    assert answer["metadata"]["deletionGracePeriodSeconds"] == 86400
    states = _states(shared_cluster, pods, before)
    ending = next(each for each in states if "deletionTimestamp" in each["metadata"])
    assert (ending["status"]["phase"], _exit_code(ending)) == ("Running", None)
    assert _exit_code(states[-1]) == 3


def test_a_pod_that_does_not_end_is_killed(shared_cluster: Cluster, pods: str) -> None:
    """If a deleted pod ignores SIGTERM, the kubelet kills it after the grace period."""
    wanted = pod("one", "trap '' TERM; echo trapped; while :; do sleep 0.1; done")
    wanted["spec"]["terminationGracePeriodSeconds"] = 1
    shared_cluster.create(pods, wanted)
    _until_trapped(shared_cluster, pods)
    before = shared_cluster.get(f"{pods}/one")
    shared_cluster.delete(f"{pods}/one")
    assert _exit_code(_states(shared_cluster, pods, before)[-1]) == 137


def test_many_at_once(shared_cluster: Cluster, namespace: str) -> None:
    """A deletecollection request deletes exactly the objects that match its selector."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for name in "abc":
        wanted = config_map(name)
        wanted["metadata"]["labels"] = {"old": "no" if name == "c" else "yes"}
        shared_cluster.create(path, wanted)
    core = client.CoreV1Api(shared_cluster.admin)
    core.delete_collection_namespaced_config_map(namespace, label_selector="old=yes")
    names = [each["metadata"]["name"] for each in shared_cluster.get(path)["items"]]
    assert [name for name in names if name in "abc"] == ["c"]


def test_an_eviction_says_why(shared_cluster: Cluster, namespace: str, pods: str) -> None:
    """An eviction sets the condition DisruptionTarget on the pod and then deletes the pod.

    The eviction of a missing pod fails.
    """
    shared_cluster.create(pods, pod("one"))
    shared_cluster.until(pods, lambda found: found["one"]["status"]["phase"] == "Running")
    before = shared_cluster.get(f"{pods}/one")
    core = client.CoreV1Api(shared_cluster.admin)
    eviction = client.V1Eviction(metadata=client.V1ObjectMeta(name="one", namespace=namespace))
    core.create_namespaced_pod_eviction("one", namespace, eviction)
    states = _states(shared_cluster, pods, before)
    ending = next(each for each in states if "deletionTimestamp" in each["metadata"])
    reasons = [
        each["reason"]
        for each in ending["status"]["conditions"]
        if each["type"] == "DisruptionTarget"
    ]
    assert reasons == ["EvictionByEvictionAPI"]
    with pytest.raises(ApiException):
        core.create_namespaced_pod_eviction("none", namespace, eviction)
