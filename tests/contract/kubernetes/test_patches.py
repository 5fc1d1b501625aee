"""Merge, strategic merge, JSON patch, and server-side apply."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.client import Cluster
from cluster.manifests import IMAGE, config_map, pod_spec

Object = dict[str, Any]

_JSON = "application/json-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class Deployed:
    """A deployment without pods, to patch."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.path = f"/apis/apps/v1/namespaces/{namespace}/deployments/d"
        spec = pod_spec()
        spec["restartPolicy"] = "Always"
        spec["containers"][0]["env"] = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
        spec["tolerations"] = [{"key": "a", "operator": "Exists"}]
        wanted = {
            "metadata": {"name": "d"},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "d"}},
                "template": {"metadata": {"labels": {"app": "d"}}, "spec": spec},
            },
        }
        cluster.create(self.path.removesuffix("/d"), wanted)

    def patch(self, pod: Object, kind: str = _STRATEGIC) -> Object:
        body = {"spec": {"template": {"spec": pod}}}
        code, found = self.cluster.call("PATCH", self.path, body, kind)
        assert code == 200, found
        spec: Object = found["spec"]["template"]["spec"]
        return spec


@pytest.fixture
def deployed(shared_cluster: Cluster, namespace: str) -> Deployed:
    return Deployed(shared_cluster, namespace)


def test_containers_and_variables_are_merged_by_name(deployed: Deployed) -> None:
    """A strategic merge changes what it names, and keeps the rest."""
    variables = [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]
    spec = deployed.patch({"containers": [{"name": "main", "env": variables}]})
    container = spec["containers"][0]
    found = {each["name"]: each["value"] for each in container["env"]}
    assert found == {"A": "1", "B": "3", "C": "4"}
    assert container["image"] == IMAGE


def test_elements_are_deleted_and_lists_replaced_by_directive(deployed: Deployed) -> None:
    """$patch: delete, and $patch: replace."""
    delete = [{"name": "A", "$patch": "delete"}]
    spec = deployed.patch({"containers": [{"name": "main", "env": delete}]})
    assert [each["name"] for each in spec["containers"][0]["env"]] == ["B"]
    replace = [{"$patch": "replace"}, {"name": "Z", "value": "9"}]
    spec = deployed.patch({"containers": [{"name": "main", "env": replace}]})
    assert spec["containers"][0]["env"] == [{"name": "Z", "value": "9"}]


def test_tolerations_are_one_value(deployed: Deployed) -> None:
    """They have no key: a strategic merge replaces them."""
    spec = deployed.patch({"tolerations": [{"key": "b", "operator": "Exists"}]})
    assert [each["key"] for each in spec["tolerations"]] == ["b"]


def test_a_merge_patch_replaces_lists(deployed: Deployed) -> None:
    """And null removes."""
    containers = [{"name": "other", "image": "x"}]
    patch = {"containers": containers, "tolerations": None}
    spec = deployed.patch(patch, "application/merge-patch+json")
    assert [each["name"] for each in spec["containers"]] == ["other"]
    assert "tolerations" not in spec


def test_json_patches(shared_cluster: Cluster, namespace: str) -> None:
    """add, replace, remove, test, move and copy; one that fails changes nothing."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    shared_cluster.create(path, config_map("a", x="1", y="2"))
    operations = [
        {"op": "test", "path": "/data/x", "value": "1"},
        {"op": "replace", "path": "/data/x", "value": "3"},
        {"op": "add", "path": "/metadata/labels", "value": {"example.com/a": "b"}},
        {"op": "copy", "from": "/data/x", "path": "/data/z"},
        {"op": "remove", "path": "/metadata/labels/example.com~1a"},
        {"op": "move", "from": "/data/y", "path": "/data/w"},
    ]
    found = shared_cluster.patch(f"{path}/a", operations)
    assert found["data"] == {"x": "3", "z": "3", "w": "2"}
    wrong = [
        {"op": "remove", "path": "/data/x"},
        {"op": "test", "path": "/data/w", "value": "no"},
    ]
    code, answer = shared_cluster.call("PATCH", f"{path}/a", wrong, _JSON)
    assert code == 422, answer
    assert shared_cluster.get(f"{path}/a")["data"]["x"] == "3"


def test_custom_kinds_take_no_strategic_merge(shared_cluster: Cluster, namespace: str) -> None:
    """415."""
    path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{namespace}/podgroups"
    shared_cluster.create(path, {"metadata": {"name": "a"}, "spec": {"minMember": 1}})
    code, _ = shared_cluster.call("PATCH", f"{path}/a", {"spec": {"minMember": 2}}, _STRATEGIC)
    assert code == 415


class Applied:
    """A ConfigMap that several managers apply."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.path = f"/api/v1/namespaces/{namespace}/configmaps/a"

    def apply(self, manager: str, data: Object, force: bool = False) -> tuple[int, Any]:
        body = {**config_map("a"), "data": data}
        query = f"fieldManager={manager}&force={str(force).lower()}"
        return self.cluster.call("PATCH", f"{self.path}?{query}", body, _APPLY)

    @property
    def data(self) -> Object:
        return dict(self.cluster.get(self.path)["data"])


@pytest.fixture
def applied(shared_cluster: Cluster, namespace: str) -> Applied:
    return Applied(shared_cluster, namespace)


def test_apply_creates_and_changes(applied: Applied) -> None:
    """201, then 200; what a manager leaves out disappears."""
    assert applied.apply("one", {"x": "1", "y": "1"})[0] == 201
    assert applied.apply("one", {"x": "2"})[0] == 200
    assert applied.data == {"x": "2"}


def test_two_managers(applied: Applied) -> None:
    """Each owns its fields; a field of another is a conflict, unless it has the same value."""
    applied.apply("one", {"x": "1"})
    assert applied.apply("two", {"y": "1"})[0] == 200
    code, answer = applied.apply("two", {"y": "1", "x": "2"})
    assert (code, answer["reason"]) == (409, "Conflict")
    assert answer["details"]["causes"][0]["reason"] == "FieldManagerConflict"
    assert 'conflict with "one"' in answer["message"]
    assert applied.apply("two", {"y": "1", "x": "1"})[0] == 200
    assert applied.apply("one", {})[0] == 200
    assert applied.data == {"y": "1", "x": "1"}


def test_a_forced_apply_takes_the_field(applied: Applied) -> None:
    """Its former owner cannot remove it any more."""
    applied.apply("one", {"x": "1", "y": "1"})
    assert applied.apply("two", {"x": "2"}, force=True)[0] == 200
    assert applied.apply("one", {"y": "1"})[0] == 200
    assert applied.data == {"x": "2", "y": "1"}


def test_what_was_written_otherwise_is_owned_too(applied: Applied) -> None:
    """An apply conflicts with a plain patch."""
    applied.apply("one", {"x": "1"})
    applied.cluster.patch(f"{applied.path}?fieldManager=hand", {"data": {"x": "2"}})
    code, answer = applied.apply("one", {"x": "1"})
    assert code == 409
    assert 'conflict with "hand"' in answer["message"]


def test_apply_of_a_job_again_changes_nothing(shared_cluster: Cluster, namespace: str) -> None:
    """What the server has filled in is nobody's."""
    from cluster.manifests import job

    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/train?fieldManager=one"
    wanted = job("train", ranks=1)
    wanted["spec"]["suspend"] = True
    wanted["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 80}]
    first = shared_cluster.call("PATCH", path, wanted, _APPLY)
    assert first[0] == 201, first
    second = shared_cluster.call("PATCH", path, wanted, _APPLY)
    assert second[0] == 200, second
    assert second[1]["metadata"]["generation"] == first[1]["metadata"]["generation"]
