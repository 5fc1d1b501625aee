"""Test objects: added fields, refusals, selectors and lists."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.client import Cluster
from cluster.manifests import config_map, job, pod
from kubernetes import client
from kubernetes.client import ApiException

Object = dict[str, Any]


@pytest.fixture
def core(shared_cluster: Cluster) -> client.CoreV1Api:
    return client.CoreV1Api(shared_cluster.admin)


@pytest.fixture
def batch(shared_cluster: Cluster) -> client.BatchV1Api:
    return client.BatchV1Api(shared_cluster.admin)


def refused(code: int, reason: str, what: Any, *arguments: Any, **named: Any) -> str:
    """Return the message of a call that the server must refuse with this code and reason."""
    with pytest.raises(ApiException) as caught:
        what(*arguments, **named)
    import json

    status = json.loads(caught.value.body)
    assert (caught.value.status, status["reason"]) == (code, reason), status
    assert status["kind"] == "Status"
    return str(status["message"])


def test_what_the_server_adds(core: client.CoreV1Api, namespace: str) -> None:
    """The server adds a uid, a creation time and the namespace. Resource versions increase."""
    one = core.create_namespaced_config_map(namespace, config_map("one", a="b")).metadata
    two = core.create_namespaced_config_map(namespace, config_map("two")).metadata
    assert one.uid != two.uid
    assert one.creation_timestamp is not None
    assert int(two.resource_version) > int(one.resource_version)
    assert one.namespace == namespace


def test_a_config_map_has_a_limit(core: client.CoreV1Api, namespace: str) -> None:
    """The server limits names and values of a ConfigMap to 1 MiB, on creation and on change."""
    most = config_map("most", a="x" * ((1 << 20) - 1))
    core.create_namespaced_config_map(namespace, most)
    more = {"data": {"a": "x" * (1 << 20)}}
    message = refused(422, "Invalid", core.patch_namespaced_config_map, "most", namespace, more)
    assert "Too long" in message
    much = config_map("much", a="x" * (1 << 20))
    refused(422, "Invalid", core.create_namespaced_config_map, namespace, much)


def test_names(core: client.CoreV1Api, namespace: str) -> None:
    """An object gets a valid DNS name or a generated name; other names get 422."""
    wanted = config_map("x")
    wanted["metadata"] = {"generateName": "made-"}
    made = core.create_namespaced_config_map(namespace, wanted)
    assert made.metadata.name.startswith("made-")
    assert len(made.metadata.name) == len("made-") + 5
    for name in ("Upper", "under_score", "-dash", "x" * 254):
        refused(422, "Invalid", core.create_namespaced_config_map, namespace, config_map(name))
    message = refused(422, "Invalid", core.create_namespaced_config_map, namespace, config_map(""))
    assert "name or generateName is required" in message


def test_the_same_name_twice(batch: client.BatchV1Api, namespace: str) -> None:
    """A second object with the same name gets 409 with the reason AlreadyExists.

    The reason distinguishes it from a conflict.
    """
    wanted = job("train", ranks=0)
    batch.create_namespaced_job(namespace, wanted)
    message = refused(409, "AlreadyExists", batch.create_namespaced_job, namespace, wanted)
    assert message == 'jobs.batch "train" already exists'


def test_what_is_not_there(core: client.CoreV1Api, namespace: str) -> None:
    """A missing object gets 404, and also a creation in a missing namespace."""
    message = refused(404, "NotFound", core.read_namespaced_pod, "none", namespace)
    assert message == 'pods "none" not found'
    message = refused(
        404, "NotFound", core.create_namespaced_config_map, "nowhere", config_map("a")
    )
    assert message == 'namespaces "nowhere" not found'


def test_a_stale_object_is_not_written(core: client.CoreV1Api, namespace: str) -> None:
    """A replacement with an old version gets 409 Conflict, and also a patch with an old version."""
    core.create_namespaced_config_map(namespace, config_map("a", x="1"))
    stale = core.read_namespaced_config_map("a", namespace)
    core.patch_namespaced_config_map("a", namespace, {"data": {"x": "2"}})
    stale.data = {"x": "3"}
    message = refused(409, "Conflict", core.replace_namespaced_config_map, "a", namespace, stale)
    assert "the object has been modified" in message
    version = stale.metadata.resource_version
    patch = {"metadata": {"resourceVersion": version}, "data": {"x": "3"}}
    refused(409, "Conflict", core.patch_namespaced_config_map, "a", namespace, patch)
    assert core.read_namespaced_config_map("a", namespace).data == {"x": "2"}


def test_a_custom_object_is_only_replaced_with_its_version(
    shared_cluster: Cluster, namespace: str
) -> None:
    """A replacement of a custom object without its version gets 422; also a patch of its uid."""
    custom = client.CustomObjectsApi(shared_cluster.admin)
    place = ("scheduling.volcano.sh", "v1beta1", namespace, "podgroups")
    thing = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "a"},
        "spec": {"minMember": 1},
    }
    custom.create_namespaced_custom_object(*place, thing)
    replace = custom.replace_namespaced_custom_object
    refused(422, "Invalid", replace, *place, "a", thing)
    patch = {"metadata": {"uid": "another"}}
    change = custom.patch_namespaced_custom_object
    message = refused(422, "Invalid", change, *place, "a", patch)
    assert "field is immutable" in message


def test_what_did_not_change_keeps_its_version(core: client.CoreV1Api, namespace: str) -> None:
    """A patch that changes nothing keeps the resource version of the object."""
    made = core.create_namespaced_config_map(namespace, config_map("a", x="1"))
    same = core.patch_namespaced_config_map("a", namespace, {"data": {"x": "1"}})
    assert same.metadata.resource_version == made.metadata.resource_version


def test_the_generation_counts_changes_of_the_spec(
    batch: client.BatchV1Api, namespace: str
) -> None:
    """The generation increases with changes of the spec, not with changes of labels.

    The server ignores a status that is sent with an object or a patch.
    """
    wanted = job("train", ranks=0, suspend=True)
    wanted["status"] = {"failed": 7}
    made = batch.create_namespaced_job(namespace, wanted)
    assert made.metadata.generation == 1
    assert made.status.failed is None
    patch = {"metadata": {"labels": {"a": "b"}}, "status": {"failed": 3}}
    changed = batch.patch_namespaced_job("train", namespace, patch)
    assert changed.metadata.generation == 1
    assert changed.status.failed is None
    changed = batch.patch_namespaced_job("train", namespace, {"spec": {"backoffLimit": 3}})
    assert changed.metadata.generation == 2


def test_label_selectors(core: client.CoreV1Api, namespace: str) -> None:
    """Label selectors support equality, sets, presence and absence.

    An invalid selector gets 400.
    """
    for name, labels in {"a": {"x": "1"}, "b": {"x": "2", "y": "1"}, "c": {}}.items():
        wanted = config_map(name)
        wanted["metadata"]["labels"] = labels
        core.create_namespaced_config_map(namespace, wanted)

    def found(selector: str) -> str:
        listed = core.list_namespaced_config_map(namespace, label_selector=selector).items
        ours = [each.metadata.name for each in listed if len(each.metadata.name) == 1]
        return "".join(ours)

    assert found("x=1") == "a"
    assert found("x==2,y=1") == "b"
    assert found("x!=1") == "bc"
    assert found("x in (1,2)") == "ab"
    assert found("x notin (1)") == "bc"
    assert found("x") == "ab"
    assert found("!x") == "c"
    refused(400, "BadRequest", core.list_namespaced_config_map, namespace, label_selector="x in")


def test_field_selectors(core: client.CoreV1Api, namespace: str) -> None:
    """Field selectors select by name, node and phase. An unsupported field gets 400."""
    core.create_namespaced_pod(namespace, pod("one"))
    core.create_namespaced_pod(namespace, pod("two"))

    def found(selector: str) -> list[str]:
        listed = core.list_namespaced_pod(namespace, field_selector=selector)
        return [each.metadata.name for each in listed.items]

    assert found("metadata.name=two") == ["two"]
    assert found("metadata.name!=two") == ["one"]
    assert found("spec.nodeName=nowhere") == []
    assert found("status.phase=Failed") == []
    refused(400, "BadRequest", found, "spec.hostname=x")


def test_lists_in_pieces(core: client.CoreV1Api, namespace: str) -> None:
    """A list with limit and continue returns each object once."""
    for number in range(5):
        core.create_namespaced_config_map(namespace, config_map(f"m{number}"))
    names, token = [], None
    while token != "":
        piece = core.list_namespaced_config_map(namespace, limit=2, _continue=token)
        assert len(piece.items) <= 2
        names += [each.metadata.name for each in piece.items]
        token = piece.metadata._continue or ""
    assert [name for name in names if name.startswith("m")] == [f"m{n}" for n in range(5)]


def test_a_dry_run_leaves_nothing(core: client.CoreV1Api, namespace: str) -> None:
    """A dry run of a creation, change or deletion changes nothing.

    The server refuses a dry run for the same reasons as the request itself.
    """
    core.create_namespaced_config_map(namespace, config_map("a"), dry_run="All")
    refused(404, "NotFound", core.read_namespaced_config_map, "a", namespace)
    core.create_namespaced_config_map(namespace, config_map("a"))
    core.patch_namespaced_config_map("a", namespace, {"data": {"x": "1"}}, dry_run="All")
    core.delete_namespaced_config_map("a", namespace, dry_run="All")
    assert not core.read_namespaced_config_map("a", namespace).data
    wanted = config_map("a")
    create = core.create_namespaced_config_map
    refused(409, "AlreadyExists", create, namespace, wanted, dry_run="All")
    refused(422, "Invalid", create, namespace, config_map("b"), dry_run="Some")
    refused(404, "NotFound", create, "no-such-namespace", config_map("b"), dry_run="All")


def test_unknown_fields_are_refused_on_demand(shared_cluster: Cluster, namespace: str) -> None:
    """With fieldValidation=Strict, the server refuses an unknown field in a pod's spec with 400."""
    wanted = job("train", ranks=0)
    wanted["spec"]["template"]["spec"]["nodeSelektor"] = {}
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs?fieldValidation=Strict"
    code, answer = shared_cluster.call("POST", path, wanted)
    assert (code, answer["reason"]) == (400, "BadRequest")
    assert 'unknown field "spec.template.spec.nodeSelektor"' in answer["message"]


def test_a_living_job_keeps_its_template(batch: client.BatchV1Api, namespace: str) -> None:
    """A change of the template, completions or completion mode of a running Job gets 422.

    `test_suspended_and_resumed_a_job_waits_for_no_back_off` covers changes of a suspended Job.
    """
    batch.create_namespaced_job(namespace, job("train", ranks=1))
    patch: Object = {"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}
    message = refused(422, "Invalid", batch.patch_namespaced_job, "train", namespace, patch)
    assert "spec.template" in message
    assert "field is immutable" in message
    patch = {"spec": {"completions": 5}}
    refused(422, "Invalid", batch.patch_namespaced_job, "train", namespace, patch)
    patch = {"spec": {"completionMode": "NonIndexed"}}
    refused(422, "Invalid", batch.patch_namespaced_job, "train", namespace, patch)


def test_a_pod_keeps_its_spec(core: client.CoreV1Api, namespace: str) -> None:
    """The image of a pod can change, its node selector cannot."""
    core.create_namespaced_pod(namespace, pod("one"))
    patch: Object = {"spec": {"nodeSelector": {"a": "b"}}}
    message = refused(422, "Invalid", core.patch_namespaced_pod, "one", namespace, patch)
    assert "pod updates may not change fields other than" in message
    patch = {"spec": {"containers": [{"name": "main", "image": "busybox:2"}]}}
    changed = core.patch_namespaced_pod("one", namespace, patch)
    assert changed.spec.containers[0].image == "busybox:2"
    assert changed.spec.containers[0].command[0] == "sh"


def test_jobs_that_make_no_sense(batch: client.BatchV1Api, namespace: str) -> None:
    """The server refuses an invalid Job with 422 and names the invalid field."""
    always = job("a")
    always["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    message = refused(422, "Invalid", batch.create_namespaced_job, namespace, always)
    assert "spec.template.spec.restartPolicy" in message
    empty = job("a")
    empty["spec"]["template"]["spec"]["containers"] = []
    message = refused(422, "Invalid", batch.create_namespaced_job, namespace, empty)
    assert "spec.template.spec.containers: Required value" in message
    long = job("x" * 62)
    message = refused(422, "Invalid", batch.create_namespaced_job, namespace, long)
    assert "metadata.name" in message
