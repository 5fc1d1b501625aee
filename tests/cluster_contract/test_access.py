"""Who may do what: tokens, roles, reviews, quotas."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.client import Cluster
from cluster.manifests import config_map, job, pod, rules

_PODS = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}


@pytest.fixture
def limited(shared_cluster: Cluster, namespace: str, tmp_path: Path) -> Cluster:
    """With the token of an account that may look at pods."""
    role, binding = rules("look", "runner", namespace, _PODS)
    place = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    shared_cluster.create(f"{place}/roles", role)
    shared_cluster.create(f"{place}/rolebindings", binding)
    token = shared_cluster.token_for("runner", namespace)
    path = shared_cluster.kubeconfig_for(token, tmp_path / "limited", namespace)
    found = Cluster(path)
    yield found
    found.close()


def test_an_account_may_what_its_role_says(limited: Cluster, namespace: str) -> None:
    """Everything else is 403, with the words of a real server."""
    limited.get(f"/api/v1/namespaces/{namespace}/pods")
    code, answer = limited.call("GET", f"/api/v1/namespaces/{namespace}/secrets")
    assert (code, answer["reason"]) == (403, "Forbidden")
    assert answer["message"] == (
        f'secrets is forbidden: User "system:serviceaccount:{namespace}:runner" cannot list'
        f' resource "secrets" in API group "" in the namespace "{namespace}"'
    )
    code, answer = limited.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/one")
    assert code == 403
    assert answer["message"].startswith('pods "one" is forbidden')
    assert limited.call("GET", "/api/v1/nodes")[1]["message"].endswith("at the cluster scope")
    assert limited.call("GET", "/api/v1/namespaces/default/pods")[0] == 403


def test_may_i(limited: Cluster, namespace: str) -> None:
    """SelfSubjectAccessReview answers as the server would."""

    def may(verb: str, resource: str, group: str = "", subresource: str = "") -> bool:
        asked = {"verb": verb, "resource": resource, "group": group, "namespace": namespace}
        asked["subresource"] = subresource
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(limited.create(path, review)["status"]["allowed"])

    assert may("list", "pods")
    assert may("get", "pods", subresource="log")
    assert not may("watch", "pods")
    assert not may("create", "jobs", "batch")


def test_a_wrong_token_is_nobody(shared_cluster: Cluster, tmp_path: Path) -> None:
    """401."""
    path = shared_cluster.kubeconfig_for("no-such-token", tmp_path / "wrong")
    stranger = Cluster(path)
    try:
        code, answer = stranger.call("GET", "/api/v1/nodes")
    finally:
        stranger.close()
    assert (code, answer["reason"]) == (401, "Unauthorized")


def test_a_quota_refuses_pods(shared_cluster: Cluster, namespace: str) -> None:
    """403 for whoever creates one; a Job waits, and says why in an event."""
    place = f"/api/v1/namespaces/{namespace}"
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    shared_cluster.create(f"{place}/resourcequotas", quota)
    shared_cluster.until(f"{place}/resourcequotas", lambda found: found["few"].get("status"))
    for name in ("one", "two"):
        shared_cluster.create(f"{place}/pods", pod(name))
    code, answer = shared_cluster.call("POST", f"{place}/pods", pod("three"))
    assert (code, answer["reason"]) == (403, "Forbidden")
    assert answer["message"] == (
        'pods "three" is forbidden: exceeded quota: few, requested: pods=1, used: pods=2,'
        " limited: pods=2"
    )
    shared_cluster.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job("train", ranks=1))
    shared_cluster.until(
        f"{place}/events",
        lambda found: any(
            each["reason"] == "FailedCreate" and "exceeded quota" in each["message"]
            for each in found.values()
        ),
    )
    shared_cluster.delete(f"{place}/pods/one")
    shared_cluster.until(
        f"{place}/pods", lambda found: any(name.startswith("train-0-") for name in found)
    )


def test_what_is_asked_for_counts_against_a_quota(shared_cluster: Cluster, namespace: str) -> None:
    """And a pod that does not say what it needs is refused."""
    place = f"/api/v1/namespaces/{namespace}"
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "1"}}}
    shared_cluster.create(f"{place}/resourcequotas", quota)
    shared_cluster.until(f"{place}/resourcequotas", lambda found: found["small"].get("status"))
    code, answer = shared_cluster.call("POST", f"{place}/pods", pod("silent"))
    assert code == 403
    assert "must specify requests.cpu for: main" in answer["message"]
    for name, code in (("first", 201), ("second", 403)):
        wanted = pod(name)
        wanted["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "600m"}}
        assert shared_cluster.call("POST", f"{place}/pods", wanted)[0] == code


def test_discovery(shared_cluster: Cluster) -> None:
    """Groups and kinds; 404 for those that there are not."""
    groups = {each["name"] for each in shared_cluster.get("/apis")["groups"]}
    assert {"batch", "apps"} <= groups
    found = shared_cluster.get("/apis/batch/v1")["resources"]
    assert {"jobs", "jobs/status"} <= {each["name"] for each in found}
    assert shared_cluster.call("GET", "/apis/nothing.example.com/v1")[0] == 404
    assert shared_cluster.call("GET", "/readyz")[1] == "ok"
    assert shared_cluster.get("/version")["major"] == "1"


def test_a_namespace_takes_all_with_it(shared_cluster: Cluster, namespace: str) -> None:
    """Once nothing is left in it, it is gone."""
    name = f"{namespace}-more"
    shared_cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    shared_cluster.create(f"/api/v1/namespaces/{name}/configmaps", config_map("a"))
    shared_cluster.delete(f"/api/v1/namespaces/{name}")
    shared_cluster.until("/api/v1/namespaces", lambda found: name not in found)
    assert shared_cluster.call("GET", f"/api/v1/namespaces/{name}/configmaps/a")[0] == 404


def test_what_a_pod_names_must_be_there(shared_cluster: Cluster, namespace: str) -> None:
    """Its account and its priority class: 403."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    for field, told in (
        ("serviceAccountName", "error looking up service account"),
        ("priorityClassName", "no PriorityClass with name none was found"),
    ):
        wanted = pod("one")
        wanted["spec"][field] = "none"
        code, answer = shared_cluster.call("POST", path, wanted)
        assert (code, answer["reason"]) == (403, "Forbidden")
        assert told in answer["message"]
