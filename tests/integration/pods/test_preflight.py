"""A launch reports the requirements that a cluster does not meet before it creates an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import role
from cluster.launch import Simulated
from rendered import pods, spec

from rekindle import names
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.engine import KubernetesEngine
from rekindle.engines.kubernetes.manifests.render import render
from rekindle.engines.kubernetes.preflight.namespace_checks import FindingState
from rekindle.engines.kubernetes.preflight.preflight import must_fit, survey
from rekindle.errors import JobError, UsageError
from rekindle.job.spec import JobDirectory

pytestmark = pytest.mark.timeout(300)  # a cluster

Object = dict[str, Any]


class Placing:
    """Launches jobs that the cluster must refuse, and searches for objects that they leave."""

    def __init__(self, server: Simulated, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def refused(self, settings: Object, kubeconfig: Path | None = None, **job: Any) -> str:
        """Launch a job; return its error, and check that no object exists."""
        directory = JobDirectory(self.folder / "job")
        wanted = pods(**settings)
        directory.create(spec(directory=str(directory.path), **job), logs=False)
        directory.pods.write_bytes(msgspec.json.encode(wanted))
        api = load(str(kubeconfig or self.server.kubeconfig), patience_s=0.5)
        try:
            with pytest.raises((UsageError, JobError)) as error:
                KubernetesEngine(directory, wanted, api).launch(attempt=1)
        finally:
            api.close()
        assert self.made() == []
        return str(error.value)

    def made(self) -> list[str]:
        """Return all objects of jobs in all namespaces."""
        found = []
        for path in (
            *(f"/api/v1/{plural}" for plural in ("configmaps", "secrets", "services", "pods")),
            "/apis/apps/v1/deployments",
            "/apis/batch/v1/jobs",
            "/apis/networking.k8s.io/v1/networkpolicies",
        ):
            items = self.server.get(f"{path}?labelSelector=rekindle.dev/job")["items"]
            found += [f"{path}/{each['metadata']['name']}" for each in items]
        return found


@pytest.fixture
def placing(lean: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placing:
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    return Placing(lean, tmp_path)


def test_a_namespace_that_is_not_there(placing: Placing) -> None:
    """The error names a missing namespace and the command that creates it."""
    output = placing.refused({"namespace": "nowhere"})
    assert "job demo cannot run in namespace nowhere of http://127.0.0.1" in output
    assert "namespace nowhere: it does not exist (kubectl create namespace nowhere)" in output


def test_wrong_tables_of_faults(placing: Placing, space: str, tmp_path: Path) -> None:
    """An invalid fault table on this machine is an error before an object is created."""
    (tmp_path / "own.toml").write_text("[[exit]]\ncodes = [77]\nkind = 'transient'\n")
    output = placing.refused({"namespace": space}, fault_tables=str(tmp_path / "own.toml"))
    assert "own.toml:1: " in output


def test_a_kind_that_is_not_installed(placing: Placing, space: str) -> None:
    """The error of a missing kind has its group and version, and advice to install it."""
    output = placing.refused({"namespace": space, "kind": "jobset"})
    assert "kind jobsets of jobset.x-k8s.io/v1alpha2: the cluster has nothing of jobset.x" in output
    assert "install JobSet, or choose another kind" in output


def test_no_rights(placing: Placing, lean: Simulated, space: str, tmp_path: Path) -> None:
    """One error has all missing rights and the file that grants them."""
    kubeconfig = lean.kubeconfig_for(lean.token_for("nobody", space), tmp_path / "nobody")
    output = placing.refused({"namespace": space}, kubeconfig)
    for right in (
        "right to configmaps: the user has no right to create, get, delete",
        "right to jobs.batch: the user has no right to create, get, delete, patch",
        "right to pods: the user has no right to list, watch, delete",
        "right to services/proxy: the user has no right to create, get",
    ):
        assert right in output
    assert "as deploy/base/role.yaml does" in output
    assert "optional" not in output
    assert "nodes" not in output


def test_one_right_is_missing(placing: Placing, lean: Simulated, space: str) -> None:
    """If one right is missing, the error has only that right."""
    kubeconfig = role.flows(lean, placing.folder / "flows", space)
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/roles/rekindle-flows"
    found = lean.get(path)
    for rule in found["rules"]:
        if "deployments" in rule["resources"]:
            rule["verbs"] = ["create", "get"]
    lean.patch(path, {"rules": found["rules"]})
    output = placing.refused({"namespace": space}, kubeconfig)
    assert output.count("\n") == 1
    assert "right to deployments.apps: the user has no right to patch" in output


def test_a_stranger(placing: Placing, lean: Simulated, space: str, tmp_path: Path) -> None:
    """The error reports a user whom the server does not accept."""
    kubeconfig = lean.kubeconfig_for("no-such-token", tmp_path / "wrong")
    output = placing.refused({"namespace": space}, kubeconfig)
    assert "user: the server does not accept the user" in output
    assert "Unauthorized" in output


def test_nobody_answers(placing: Placing, lean: Simulated, tmp_path: Path) -> None:
    """If no server answers, the error has the address."""
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(lean.kubeconfig.read_text().replace(f":{lean.port}", ":1"))
    assert "127.0.0.1:1" in placing.refused({}, kubeconfig)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image": ""}, "image is ''; name the image that holds the training script"),
        ({"namespace": "n" * 64}, "use at most 63 of a-z 0-9 -"),
        ({"priority_class": "p" * 254}, "use at most 253 of a-z 0-9 -"),
    ],
)
def test_what_no_cluster_could_have(placing: Placing, fields: Object, text: str) -> None:
    """An empty image and too long names are errors."""
    assert text in placing.refused(fields)


def test_a_quota_that_wants_amounts(placing: Placing, lean: Simulated, space: str) -> None:
    """A quota refuses a pod without amounts; the error has the server's own message."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"limits.cpu": "99"}}}
    lean.create(f"/api/v1/namespaces/{space}/resourcequotas", quota)
    output = placing.refused({"namespace": space})
    assert "dry run of a worker pod: POST" in output
    assert "is forbidden: failed quota: few: must specify limits.cpu for: training (" in output
    assert "dry run of a coordinator pod: POST" in output


def test_a_limit_that_lets_no_pod_in(placing: Placing, lean: Simulated, space: str) -> None:
    """The error has the server's message if a LimitRange refuses a pod."""
    rules = [{"type": "Container", "max": {"memory": "1Gi"}}]
    limit = {"metadata": {"name": "small"}, "spec": {"limits": rules}}
    lean.create(f"/api/v1/namespaces/{space}/limitranges", limit)
    output = placing.refused({"namespace": space, "memory": "2Gi"})
    assert (
        "forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi (change" in output
    )
    assert output.count("\n") == 1


def test_who_may_not_create_pods_is_let_through(
    placing: Placing, lean: Simulated, space: str
) -> None:
    """Without the right to create pods, no dry run of pods occurs, and the launch can proceed.

    The Role of deploy/ does not have that right.
    """
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"limits.cpu": "99"}}}
    lean.create(f"/api/v1/namespaces/{space}/resourcequotas", quota)
    api = load(str(role.flows(lean, placing.folder / "flows", space)), patience_s=0.5)
    wanted = pods(namespace=space)
    found = survey(api, wanted.kind, render(spec(), wanted, secret="-"))
    api.close()
    (pod,) = [each for each in found if each.what == "dry run of pods"]
    assert (pod.state, pod.optional) == (FindingState.UNKNOWN, True)
    assert pod.result.startswith(
        "the user has no right to create: only the run shows whether quotas"
    )


def test_a_quota_that_is_used_up(placing: Placing, lean: Simulated, space: str) -> None:
    """A used-up quota does not stop a launch, because other pods may end; the check shows it."""
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    lean.create(f"/api/v1/namespaces/{space}/resourcequotas", quota)
    api = load(str(lean.kubeconfig))
    wanted = pods(namespace=space)
    try:
        must_fit(api, spec(), wanted)
        found = survey(api, wanted.kind, render(spec(), wanted, secret="-"))
    finally:
        api.close()
    refused = [each for each in found if "exceeded quota" in each.result]
    assert [each.what for each in refused] == [
        "dry run of a worker pod",
        "dry run of a coordinator pod",
    ]
    assert all(
        each.state is FindingState.UNKNOWN and "wait until other pods" in each.do
        for each in refused
    )
    assert (
        "exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0"
        in refused[0].result
    )


def test_what_pods_name_and_is_not_there(placing: Placing, space: str) -> None:
    """The error names each missing object that the pods use."""
    output = placing.refused(
        {
            "namespace": space,
            "priority_class": "high",
            "service_account": "runner",
            "image_pull_secrets": ["pull"],
            "volumes": [{"name": "data", "mount_path": "/data", "claim": "disk"}],
            "pod_overrides": {"spec": {"runtimeClassName": "nvidia"}},
        }
    )
    for what in (
        "PriorityClass high",
        "ServiceAccount runner",
        "RuntimeClass nvidia",
        "Secret pull",
        "PersistentVolumeClaim disk",
    ):
        assert f"{what}: the pods use it, but it does not exist" in output
    assert f"kubectl create serviceaccount runner -n {space}" in output


def test_what_the_server_refuses_of_the_workload(placing: Placing, space: str) -> None:
    """A dry run of the workload gives the server's refusal before an object is created."""
    patch = {"spec": {"completions": None}}
    output = placing.refused({"namespace": space, "overrides": patch})
    assert "dry run of Job demo: POST" in output
    assert "spec.completions: Required value" in output


def test_a_name_that_is_taken(placing: Placing, lean: Simulated, space: str) -> None:
    """If another job's object has the workload's name, the launch creates no object."""
    path = f"/apis/batch/v1/namespaces/{space}/jobs"
    pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "b"}]}}
    lean.create(path, {"metadata": {"name": "demo"}, "spec": {"suspend": True, "template": pod}})
    output = placing.refused({"namespace": space})
    assert "an object of this name belongs to another job (give the job another name)" in output
