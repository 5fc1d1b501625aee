"""Test the injection of faults into requests, connections, the server and nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3
from cluster.client import Cluster
from cluster.launch import Simulated
from cluster.manifests import config_map, job, pod, rules
from cluster.spaces import Space, uids
from waiting import bound_s, wait_until

Object = dict[str, Any]
EXPIRES_S = 0.5  # read timeout of a client
FOREVER_S = 86400.0
pytestmark = pytest.mark.simulated


@pytest.fixture
def own(cluster: Simulated) -> Space:
    return Space(cluster, "default")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (403, "Forbidden"),
        (409, "Conflict"),
        (410, "Expired"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ],
)
def test_the_next_requests_fail(
    shared_cluster: Simulated, namespace: str, code: int, reason: str
) -> None:
    """`inject` makes the given number of requests of a verb and resource fail, and no others."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    shared_cluster.inject("list", "configmaps", count=2, code=code)
    assert shared_cluster.call("GET", f"{path}/none")[0] == 404
    for _ in range(2):
        found, answer = shared_cluster.call("GET", path)
        assert (found, answer["reason"]) == (code, reason)
    assert shared_cluster.call("GET", path)[0] == 200
    assert shared_cluster.faults() == []


def test_too_many_requests_say_when(shared_cluster: Simulated, namespace: str) -> None:
    """An injected 429 has the header Retry-After with the given number of seconds."""
    shared_cluster.inject("get", "configmaps", code=429, retry_after=7)
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    response = shared_cluster._request("GET", path, None, "application/json")
    assert response.status == 429
    assert response.headers["Retry-After"] == "7"


def test_delays_and_cuts(shared_cluster: Simulated, namespace: str) -> None:
    """An injected delay exceeds a client's read timeout; an injected cut drops its connection."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    shared_cluster.inject("list", "configmaps", delay=FOREVER_S)
    with pytest.raises(urllib3.exceptions.ReadTimeoutError):
        shared_cluster._request("GET", path, None, "application/json", timeout=EXPIRES_S)
    assert shared_cluster.faults() == []
    shared_cluster.inject("list", "configmaps", delay=0.1)
    assert shared_cluster.call("GET", path)[0] == 200
    shared_cluster.inject("list", "configmaps", cut=True)
    with pytest.raises(urllib3.exceptions.HTTPError):
        shared_cluster.call("GET", path)
    assert shared_cluster.call("GET", path)[0] == 200


def test_a_watch_is_cut_in_its_midst(shared_cluster: Simulated, namespace: str) -> None:
    """An injected cut ends a watch after the given number of events.

    `cut` ends all open watches of a resource.
    """
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    shared_cluster.create(path, config_map("a"))
    shared_cluster.create(path, config_map("b"))
    shared_cluster.inject("watch", "configmaps", cut=True, after=1)
    assert _names(shared_cluster, f"{path}?watch=1") == ["a"]
    assert _names(shared_cluster, f"{path}?watch=1", cut_at="b") == ["a", "b"]


def test_calls_are_counted(shared_cluster: Simulated, namespace: str) -> None:
    """The server counts its calls by user, verb and resource."""
    since = time.time()
    shared_cluster.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/none")
    shared_cluster.call("GET", f"/api/v1/namespaces/{namespace}/pods")
    calls = shared_cluster.calls(since, "admin")
    found = [(call["verb"], call["resource"], call["code"]) for call in calls]
    assert found == [("get", "configmaps", 404), ("list", "pods", 200)]
    assert shared_cluster.counts(since)["admin"] == {"get configmaps": 1, "list pods": 1}


@pytest.mark.parametrize("cluster", [{"without": "jobsets,ascendjobs"}], indirect=True)
def test_kinds_that_are_not_installed(cluster: Simulated) -> None:
    """If a kind is not installed, its group and its path get 404, and discovery omits its group."""
    assert cluster.call("GET", "/apis/jobset.x-k8s.io/v1alpha2")[0] == 404
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
    assert cluster.call("GET", path)[0] == 404
    assert "jobset.x-k8s.io" not in {each["name"] for each in cluster.get("/apis")["groups"]}
    assert cluster.call("GET", "/apis/batch.volcano.sh/v1alpha1")[0] == 200


def test_a_killed_server_goes_on(own: Space, tmp_path: Path) -> None:
    """A killed server restarts with the same objects, versions and service account tokens.

    Versions from before the restart get 410. Pods keep running.
    """
    cluster = own.cluster
    assert isinstance(cluster, Simulated)
    cluster.create(own.jobs, job("train"))
    first = own.ranks()
    token = cluster.token_for("runner")
    role, binding = rules(
        "look", "runner", "default", {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    )
    place = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    cluster.create(f"{place}/roles", role)
    cluster.create(f"{place}/rolebindings", binding)
    before = cluster.get(own.pods)
    limited = Cluster(cluster.kubeconfig_for(token, tmp_path / "limited"))
    cluster.restart_server(deny_for=bound_s(1.0))
    try:
        assert limited.call("GET", own.pods)[0] == 403
        wait_until(lambda: limited.call("GET", own.pods)[0] == 200, "the rights", pause_s=0.05)
    finally:
        limited.close()
    after = cluster.get(own.pods)
    for old, new in zip(before["items"], after["items"], strict=True):
        assert old["metadata"]["uid"] == new["metadata"]["uid"]
    assert int(after["metadata"]["resourceVersion"]) >= int(before["metadata"]["resourceVersion"])
    _, event = cluster.call("GET", f"{own.pods}?watch=1&resourceVersion=1")
    assert event["object"]["code"] == 410
    assert uids(own.ranks()) == uids(first)
    # Controllers and kubelet continue as well.
    cluster.delete(f"{own.pods}/{first[0]['metadata']['name']}")
    own.ranks(besides=(first[0]["metadata"]["uid"],))


def test_a_lost_node(own: Space) -> None:
    """The pods of a lost node are replaced after their tolerationSeconds.

    If the node returns, it removes the old pods, and its taint disappears.
    """
    cluster = own.cluster
    assert isinstance(cluster, Simulated)
    wanted = job("train")
    seconds = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    wanted["spec"]["template"]["spec"]["tolerations"] = [seconds]
    cluster.create(own.jobs, wanted)
    first = own.ranks()
    node = first[0]["spec"]["nodeName"]
    cluster.kill_node(node)

    def is_lost(found: dict[str, Object]) -> bool:
        ready = [e for e in found[node]["status"]["conditions"] if e["type"] == "Ready"]
        taints = found[node]["spec"].get("taints") or []
        keys = {(each["key"], each["effect"]) for each in taints}
        unreachable = ("node.kubernetes.io/unreachable", "NoExecute")
        return ready[0]["status"] == "Unknown" and unreachable in keys

    cluster.until("/api/v1/nodes", is_lost)
    second = own.ranks(besides=(first[0]["metadata"]["uid"],))
    assert second[0]["spec"]["nodeName"] != node
    name = first[0]["metadata"]["name"]
    old = cluster.get(f"{own.pods}/{name}")
    assert "deletionTimestamp" in old["metadata"]
    cluster.revive_node(node)
    cluster.until(own.pods, lambda found: name not in found)
    cluster.until("/api/v1/nodes", lambda found: not found[node]["spec"].get("taints"))


def test_out_of_service(own: Space) -> None:
    """With podReplacementPolicy Failed, the out-of-service taint lets the Job replace a pod."""
    cluster = own.cluster
    assert isinstance(cluster, Simulated)
    wanted = job("train", ranks=1, podReplacementPolicy="Failed")
    seconds = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    wanted["spec"]["template"]["spec"]["tolerations"] = [seconds]
    cluster.create(own.jobs, wanted)
    first = own.ranks(1)[0]
    node = first["spec"]["nodeName"]
    cluster.kill_node(node)
    name = first["metadata"]["name"]
    cluster.until(own.pods, lambda found: "deletionTimestamp" in found[name]["metadata"])
    assert len(cluster.get(own.pods)["items"]) == 1
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown"}
    taints = cluster.get(f"/api/v1/nodes/{node}")["spec"]["taints"]
    patch = {"spec": {"taints": [*taints, {**taint, "effect": "NoExecute"}]}}
    cluster.patch(f"/api/v1/nodes/{node}", patch)
    cluster.until(own.pods, lambda found: name not in found)
    own.ranks(1, besides=(first["metadata"]["uid"],))


def test_logs_of_a_lost_node(own: Space) -> None:
    """If a node is lost, an open log stream breaks, and a request for the log gets 500."""
    cluster = own.cluster
    assert isinstance(cluster, Simulated)
    cluster.create(own.pods, pod("one", "echo here; exec sleep 60"))
    node = own.running(1)["one"]["spec"]["nodeName"]
    path = f"{own.pods}/one/log?follow=true"
    assert _broken_log(cluster, path, lambda: cluster.kill_node(node)) == b"here\n"
    assert cluster.call("GET", f"{own.pods}/one/log")[0] == 500


def _names(cluster: Simulated, path: str, cut_at: str = "") -> list[str]:
    """Return the names that a watch reports before its connection breaks.

    `cut_at`: the name after which all watches are cut; empty: no cut.
    """
    seen: list[str] = []
    try:
        for _, thing in cluster._events(path, bound_s(20)):
            seen.append(thing["metadata"]["name"])
            if seen[-1] == cut_at:
                cluster.cut("configmaps")
    except urllib3.exceptions.HTTPError:
        return seen
    raise AssertionError("it ended as it should not")


def _broken_log(cluster: Simulated, path: str, then: Callable[[], None]) -> bytes:
    """Return the bytes of a log that arrive before the connection breaks.

    `then`: a function that runs after each piece.
    """
    response = cluster._request("GET", path, None, "application/json", preload_content=False)
    seen = b""
    try:
        for piece in response.stream(16):
            seen += piece
            then()
    except urllib3.exceptions.HTTPError:
        return seen
    finally:
        response.close()
    raise AssertionError("it ended as it should not")
