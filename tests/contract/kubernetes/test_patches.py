"""Test merge patches, strategic merge patches and server-side apply."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.client import Cluster
from cluster.manifests import IMAGE, config_map, job, pod_spec

Object = dict[str, Any]

_STRATEGIC = "application/strategic-merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class Deployed:
    """A deployment without pods that the tests patch."""

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
    """A strategic merge changes the named containers and variables, and keeps the others."""
    variables = [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]
    spec = deployed.patch({"containers": [{"name": "main", "env": variables}]})
    container = spec["containers"][0]
    found = {each["name"]: each["value"] for each in container["env"]}
    assert found == {"A": "1", "B": "3", "C": "4"}
    assert container["image"] == IMAGE


def test_tolerations_are_one_value(deployed: Deployed) -> None:
    """A strategic merge replaces the list of tolerations, because tolerations have no key."""
    spec = deployed.patch({"tolerations": [{"key": "b", "operator": "Exists"}]})
    assert [each["key"] for each in spec["tolerations"]] == ["b"]


def test_a_merge_patch_replaces_lists(deployed: Deployed) -> None:
    """A merge patch replaces lists, and null removes a field."""
    containers = [{"name": "other", "image": "x"}]
    patch = {"containers": containers, "tolerations": None}
    spec = deployed.patch(patch, "application/merge-patch+json")
    assert [each["name"] for each in spec["containers"]] == ["other"]
    assert "tolerations" not in spec


def test_custom_kinds_take_no_strategic_merge(shared_cluster: Cluster, namespace: str) -> None:
    """A strategic merge of a custom object gets 415."""
    path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{namespace}/podgroups"
    shared_cluster.create(path, {"metadata": {"name": "a"}, "spec": {"minMember": 1}})
    code, _ = shared_cluster.call("PATCH", f"{path}/a", {"spec": {"minMember": 2}}, _STRATEGIC)
    assert code == 415


def test_apply_creates_and_changes(shared_cluster: Cluster, namespace: str) -> None:
    """The first apply creates the object.

    The second removes only fields that the first apply set.
    """
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"

    def apply(**data: str) -> int:
        query = "?fieldManager=one&force=true"
        return shared_cluster.call("PATCH", path + query, config_map("a", **data), _APPLY)[0]

    assert apply(x="1", y="1") == 201
    shared_cluster.patch(f"{path}?fieldManager=hand", {"data": {"z": "1"}})
    assert apply(x="2") == 200
    assert shared_cluster.get(path)["data"] == {"x": "2", "z": "1"}


def test_apply_of_a_job_again_changes_nothing(shared_cluster: Cluster, namespace: str) -> None:
    """A second apply of the same Job keeps the defaults of the server, so the generation stays."""
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/train?fieldManager=one"
    wanted = job("train", ranks=1)
    wanted["spec"]["suspend"] = True
    wanted["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 80}]
    first = shared_cluster.call("PATCH", path, wanted, _APPLY)
    assert first[0] == 201, first
    second = shared_cluster.call("PATCH", path, wanted, _APPLY)
    assert second[0] == 200, second
    assert second[1]["metadata"]["generation"] == first[1]["metadata"]["generation"]
