"""The pods of a job: their templates, their quantities, and the objects that they name."""

from __future__ import annotations

from decimal import Decimal

import pytest
from rendered import rendered, spec

from rekindle.engines.kubernetes.labels import ROLE, Role
from rekindle.engines.kubernetes.manifests.quantities import amount
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.engines.kubernetes.preflight.namespace_checks import mentions, pod_templates
from rekindle.errors import UsageError

SAID = {"device": "nvidia.com/gpu", "cpu": "500m", "memory": "2Gi"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5Gi", str(3 * 2**29)),
        ("2k", "2000"),
        ("1e3", "1000"),
        ("1E", "1000000000000000000"),
        ("3u", "0.000003"),
        (".5", "0.5"),
        (4, "4"),
    ],
)
def test_amounts(text: object, value: str) -> None:
    """amount() converts quantities to exact numbers."""
    assert amount(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "many", "1GB", "-1"])
def test_no_amounts(text: str) -> None:
    """amount() refuses text that is not a quantity."""
    with pytest.raises(UsageError, match="is not an amount"):
        amount(text)


@pytest.mark.parametrize("kind", [kind.value for kind in WorkloadKind])
def test_pods_of_every_kind(kind: str) -> None:
    """pod_templates() returns the templates of nodes and coordinator for each kind of workload."""
    found = pod_templates(WorkloadKind(kind), rendered(kind, job=spec(nodes=3, spares=1), **SAID))
    roles = [each["metadata"]["labels"][ROLE] for each in found]
    assert roles == [Role.WORKER.value, Role.COORDINATOR.value]
    assert found[0]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_leader_that_is_different() -> None:
    """If the leader has a different template, pod_templates() also returns it."""
    patch = {"spec": {"replicaSpecs": {"Master": {"template": {"spec": {"hostname": "first"}}}}}}
    found = pod_templates(WorkloadKind.ASCENDJOB, rendered("ascendjob", overrides=patch))
    assert [each["spec"].get("hostname") for each in found] == ["first", None, None]


def test_what_pods_name() -> None:
    """mentions() returns all necessary objects, without optional ones."""
    fields = {
        "priority_class": "high",
        "service_account": "runner",
        "image_pull_secrets": ["pull"],
        "env_from_secrets": ["store"],
        "volumes": [
            {"name": "a", "mount_path": "/a", "claim": "data"},
            {"name": "b", "mount_path": "/b", "config_map": "words"},
            {"name": "c", "mount_path": "/c", "secret": "keys"},
        ],
        "pod_overrides": {
            "spec": {
                "runtimeClassName": "nvidia",
                "volumes": [{"name": "d", "configMap": {"name": "none", "optional": True}}],
            }
        },
    }
    (pod, coordinator) = pod_templates(WorkloadKind.INDEXED_JOB, rendered(**fields))
    named = {(each.kind, each.name) for each in mentions(pod["spec"])}
    assert named == {
        ("PriorityClass", "high"),
        ("ServiceAccount", "runner"),
        ("RuntimeClass", "nvidia"),
        ("PersistentVolumeClaim", "data"),
        ("ConfigMap", "words"),
        *(("Secret", name) for name in ("pull", "store", "keys", "demo-secret")),
    }
    assert {each.name for each in mentions(coordinator["spec"])} == {"demo-secret", "pull"}
