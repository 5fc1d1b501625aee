"""Test the access rules of the API server: tokens, roles, reviews, quotas and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.client import Cluster
from cluster.manifests import config_map, job, pod, rules
from waiting import wait_until

_PODS = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}


@pytest.fixture
def limited(shared_cluster: Cluster, namespace: str, tmp_path: Path) -> Cluster:
    """Yield a client whose account may only get and list pods and read their logs."""
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
    """If the role of an account does not allow a request, the server answers 403.

    The message is the same as in a real cluster.
    """
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
    """A SelfSubjectAccessReview returns the decision that the server makes for the same request."""

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


_REVIEWS = {
    "SelfSubjectReview": "/apis/authentication.k8s.io/v1/selfsubjectreviews",
    "SelfSubjectAccessReview": "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
}


def _review(kind: str) -> dict[str, object]:
    made: dict[str, object] = {"apiVersion": "/".join(_REVIEWS[kind].split("/")[2:4]), "kind": kind}
    if kind == "SelfSubjectAccessReview":
        made["spec"] = {"resourceAttributes": {"verb": "get", "resource": "pods"}}
    return made


def test_who_am_i(limited: Cluster, namespace: str) -> None:
    """A SelfSubjectReview returns the name and the groups of the account."""
    kind = "SelfSubjectReview"
    user = limited.create(_REVIEWS[kind], _review(kind))["status"]["userInfo"]
    assert user["username"] == f"system:serviceaccount:{namespace}:runner"
    assert {"system:authenticated", f"system:serviceaccounts:{namespace}"} <= {*user["groups"]}


@pytest.mark.parametrize("kind", _REVIEWS)
def test_nobody_may_ask_about_itself(kind: str, shared_cluster: Cluster, tmp_path: Path) -> None:
    """A review without a token gets 403, or 401 if the server disables anonymous access.

    A review with an invalid token gets 401.
    """
    content = yaml.safe_load(shared_cluster.kubeconfig.read_text())
    content["users"] = [{"name": each["name"], "user": {}} for each in content["users"]]
    path = tmp_path / "anonymous"
    path.write_text(yaml.safe_dump(content))
    nobody = Cluster(path)
    wrong = Cluster(shared_cluster.kubeconfig_for("no-such-token", tmp_path / "wrong"))
    try:
        code, answer = nobody.call("POST", _REVIEWS[kind], _review(kind))
        assert code in (401, 403)
        assert code == 401 or 'User "system:anonymous" cannot create' in answer["message"]
        assert wrong.call("POST", _REVIEWS[kind], _review(kind))[0] == 401
    finally:
        nobody.close()
        wrong.close()


def test_what_is_applied_anew_is_created(
    shared_cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """If the object does not exist, server-side apply also requires the right to create it."""
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "patch"]}
    role, binding = rules("change", "changer", namespace, rule)
    place = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    shared_cluster.create(f"{place}/roles", role)
    shared_cluster.create(f"{place}/rolebindings", binding)
    token = shared_cluster.token_for("changer", namespace)
    changer = Cluster(shared_cluster.kubeconfig_for(token, tmp_path / "changer", namespace))
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    apply = ("PATCH", f"{path}/a?fieldManager=test", wanted, "application/apply-patch+yaml")
    try:
        code, answer = changer.call(*apply)
        assert (code, answer["reason"]) == (403, "Forbidden")
        shared_cluster.create(path, config_map("a"))
        assert changer.call(*apply)[0] == 200
    finally:
        changer.close()


def test_a_wrong_token_is_nobody(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A request with an invalid token gets 401."""
    path = shared_cluster.kubeconfig_for("no-such-token", tmp_path / "wrong")
    stranger = Cluster(path)
    try:
        code, answer = stranger.call("GET", "/api/v1/nodes")
    finally:
        stranger.close()
    assert (code, answer["reason"]) == (401, "Unauthorized")


def test_a_runtime_that_is_not_there(shared_cluster: Cluster) -> None:
    """A request for a missing RuntimeClass gets 404."""
    code, answer = shared_cluster.call("GET", "/apis/node.k8s.io/v1/runtimeclasses/none")
    assert (code, answer["reason"]) == (404, "NotFound")


@pytest.mark.parametrize(
    ("plural", "spec", "text"),
    [
        (
            "limitranges",
            {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]},
            "maximum memory usage per Container is 1Gi, but limit is 2Gi",
        ),
        (
            "resourcequotas",
            {"hard": {"pods": "0"}},
            "exceeded quota: small, requested: pods=1, used: pods=0, limited: pods=0",
        ),
        (
            "resourcequotas",
            {"hard": {"limits.cpu": "9"}},
            "failed quota: small: must specify limits.cpu for: main",
        ),
    ],
)
def test_a_dry_run_shows_whether_a_pod_is_let_in(
    shared_cluster: Cluster, namespace: str, plural: str, spec: dict[str, object], text: str
) -> None:
    """The dry run of a pod gets 403 if a LimitRange or a ResourceQuota refuses the pod.

    The dry run of a workload does not check LimitRanges or ResourceQuotas.
    """
    place = f"/api/v1/namespaces/{namespace}"
    shared_cluster.create(f"{place}/{plural}", {"metadata": {"name": "small"}, "spec": spec})
    wanted = pod("one")
    wanted["spec"]["containers"][0]["resources"] = {"limits": {"memory": "2Gi"}}

    def refused() -> bool:  # a real server applies a new rule after a delay
        code, answer = shared_cluster.call("POST", f"{place}/pods?dryRun=All", wanted)
        return code == 403 and answer["reason"] == "Forbidden" and text in answer["message"]

    wait_until(refused, text, 30)
    workload = job("many")
    workload["spec"]["template"]["spec"] = wanted["spec"]
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    assert shared_cluster.call("POST", f"{jobs}?dryRun=All", workload)[0] == 201


def test_a_refused_pod_is_shown(shared_cluster: Cluster, namespace: str) -> None:
    """If a quota refuses a pod, the server reports the reason.

    For a Job it creates a warning event, for a Deployment it sets a condition.
    """
    place = f"/api/v1/namespaces/{namespace}"
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    shared_cluster.create(f"{place}/resourcequotas", quota)
    shared_cluster.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job("many", ranks=1))
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    labels = {"app": "one"}
    template = {"metadata": {"labels": labels}, "spec": {**pod("one")["spec"]}}
    template["spec"]["restartPolicy"] = "Always"
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    shared_cluster.create(path, {"metadata": {"name": "one"}, "spec": spec})
    query = "fieldSelector=involvedObject.name=many,type=Warning,reason=FailedCreate"

    def texts() -> list[str]:
        return [each["message"] for each in shared_cluster.get(f"{place}/events?{query}")["items"]]

    def conditions(found: dict[str, Any]) -> list[str]:
        listed = (found["one"].get("status") or {}).get("conditions") or []
        return [each["message"] for each in listed if each["type"] == "ReplicaFailure"]

    wait_until(texts, "the warning", 30)
    assert "exceeded quota: none" in texts()[0]
    assert "exceeded quota: none" in shared_cluster.until(path, conditions)[0]


def test_discovery(shared_cluster: Cluster) -> None:
    """Discovery lists the groups and resources of the server. An unknown group gets 404."""
    groups = {each["name"] for each in shared_cluster.get("/apis")["groups"]}
    assert {"batch", "apps"} <= groups
    found = shared_cluster.get("/apis/batch/v1")["resources"]
    assert {"jobs", "jobs/status"} <= {each["name"] for each in found}
    for group in ("authentication", "authorization"):
        found = shared_cluster.get(f"/apis/{group}.k8s.io/v1")["resources"]
        assert any(each["name"].startswith("selfsubject") for each in found)
    assert {"groupVersion": "batch/v1", "version": "v1"} in shared_cluster.get("/apis/batch")[
        "versions"
    ]
    assert shared_cluster.call("GET", "/apis/nothing.example.com")[0] == 404
    assert shared_cluster.call("GET", "/apis/nothing.example.com/v1")[0] == 404
    assert shared_cluster.call("GET", "/readyz")[1] == "ok"
    assert shared_cluster.get("/version")["major"] == "1"


def test_a_namespace_takes_all_with_it(shared_cluster: Cluster, namespace: str) -> None:
    """If a namespace is deleted, the server deletes its objects, and then the namespace."""
    name = f"{namespace}-more"
    shared_cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    shared_cluster.create(f"/api/v1/namespaces/{name}/configmaps", config_map("a"))
    shared_cluster.delete(f"/api/v1/namespaces/{name}")
    shared_cluster.until("/api/v1/namespaces", lambda found: name not in found)
    assert shared_cluster.call("GET", f"/api/v1/namespaces/{name}/configmaps/a")[0] == 404


def test_what_a_pod_names_must_be_there(shared_cluster: Cluster, namespace: str) -> None:
    """A pod gets 403 if its service account or its priority class does not exist."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    for field, text in (
        ("serviceAccountName", "error looking up service account"),
        ("priorityClassName", "no PriorityClass with name none was found"),
    ):
        wanted = pod("one")
        wanted["spec"][field] = "none"
        code, answer = shared_cluster.call("POST", path, wanted)
        assert (code, answer["reason"]) == (403, "Forbidden")
        assert text in answer["message"]
