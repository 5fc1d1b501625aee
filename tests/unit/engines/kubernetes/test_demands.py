"""What a job asks of a namespace, held against quotas and limits, and what its pods name."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from rendered import rendered, spec

from rekindle.engines.kubernetes.manifests.quantities import amount
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.engines.kubernetes.preflight.namespace_checks import mentions
from rekindle.errors import UsageError

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.preflight.resource_requests import (
    Demand,
    asked,
    breaches,
    demands,
    over,
    told,
    total,
    unsaid,
    with_defaults,
)

SAID = {"device": "nvidia.com/gpu", "cpu": "500m", "memory": "2Gi"}


def limits(*rules: dict[str, Any]) -> dict[str, Any]:
    """A LimitRange."""
    return {"metadata": {"name": "limits"}, "spec": {"limits": list(rules)}}


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
    """Quantities are exact numbers."""
    assert amount(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "many", "1GB", "-1"])
def test_no_amounts(text: str) -> None:
    """What is no quantity is none."""
    with pytest.raises(UsageError, match="is no amount"):
        amount(text)


@pytest.mark.parametrize("value", ["4", "2Gi", "512Mi", "500m", "1000", "1.5"])
def test_amounts_are_told_as_they_are_written(value: str) -> None:
    """And mean the same."""
    assert amount(told(amount(value))) == amount(value)


@pytest.mark.parametrize("kind", [kind.value for kind in WorkloadKind])
def test_pods_of_every_kind(kind: str) -> None:
    """Nodes and spares whatever the kind calls them, and the coordinator's."""
    found = demands(WorkloadKind(kind), rendered(kind, job=spec(nodes=3, spares=1), **SAID))
    assert sum(each.count for each in found) == 5
    whole = total(found, ())
    assert whole["requests.nvidia.com/gpu"] == 4 * 4
    assert whole["pods"] == 5
    assert whole["cpu"] == whole["requests.cpu"] == Decimal("2.1")
    assert whole["limits.memory"] == 4 * 2**31 + 2**28
    assert "limits.cpu" not in whole


def test_containers_before_and_beside_others() -> None:
    """Those of the beginning run one by one before the others; sidecars stay."""

    def container(cpu: str, **more: str) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    pod = {
        "initContainers": [container("3"), container("1", restartPolicy="Always"), container("4")],
        "containers": [container("1"), container("1")],
    }
    assert asked(pod, "requests") == {"cpu": 4}
    pod["containers"].append(container("5"))
    assert asked(pod, "requests") == {"cpu": 8}
    assert asked(pod, "limits") == {}


def test_quotas() -> None:
    """What can never be, and what can once others have gone; objects are counted, too."""
    wanted = rendered(**SAID)
    whole = total(demands(WorkloadKind.INDEXED_JOB, wanted), wanted.every)
    hard = {"pods": "3", "requests.nvidia.com/gpu": "7", "count/jobs.batch": "1", "secrets": "9"}
    assert list(over(whole, hard, {})) == ["requests.nvidia.com/gpu"]
    assert over(whole, hard, {})["requests.nvidia.com/gpu"] == (
        "requests.nvidia.com/gpu: 8 are needed, 7 are allowed"
    )
    used = {"pods": "1", "count/jobs.batch": "1", "secrets": "8"}
    now = over(whole, hard | {"requests.nvidia.com/gpu": "8"}, used)
    assert now == {
        "pods": "pods: 3 are needed, 3 are allowed, 1 are used",
        "count/jobs.batch": "count/jobs.batch: 1 are needed, 1 are allowed, 1 are used",
    }


def test_quotas_that_want_amounts_to_be_said() -> None:
    """A pod that says nothing is let in by no such quota; a LimitRange may say it instead."""
    pods = demands(WorkloadKind.INDEXED_JOB, rendered())
    hard = {"requests.cpu": "9", "limits.memory": "9Gi", "memory": "9Gi", "limits.x/y": "1"}
    assert unsaid(pods, hard) == ["requests.cpu", "limits.memory", "memory"]
    given = limits({"type": "Container", "default": {"memory": "1Gi"}}, {"type": "Pod"})
    filled = [Demand(with_defaults(each.spec, [given]), each.count) for each in pods]
    assert unsaid(filled, hard) == ["requests.cpu"]
    assert unsaid(pods, hard) == ["requests.cpu", "limits.memory", "memory"]


def test_limits() -> None:
    """Of each container, and of the pod as a whole."""
    pod = demands(WorkloadKind.INDEXED_JOB, rendered(**SAID))[0].spec
    rules = limits(
        {"type": "Container", "max": {"memory": "1Gi", "cpu": "1"}, "min": {"cpu": "1"}},
        {"type": "Pod", "max": {"nvidia.com/gpu": "2"}},
        {"type": "PersistentVolumeClaim", "max": {"storage": "1"}},
    )
    assert list(breaches(pod, [rules])) == [
        "container training asks for 2Gi of memory, 1Gi is the most",
        "container training asks for 500m of cpu, 1 is the least",
        "the pod asks for 4 of nvidia.com/gpu, 2 is the most",
    ]
    assert not list(breaches(pod, []))


def test_what_pods_name() -> None:
    """Everything that has to be there, but not what is called optional."""
    told = {
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
    (pod, coordinator) = demands(WorkloadKind.INDEXED_JOB, rendered(**told))
    named = {(each.kind, each.name) for each in mentions(pod.spec)}
    assert named == {
        ("PriorityClass", "high"),
        ("ServiceAccount", "runner"),
        ("RuntimeClass", "nvidia"),
        ("PersistentVolumeClaim", "data"),
        ("ConfigMap", "words"),
        *(("Secret", name) for name in ("pull", "store", "keys", "demo-secret")),
    }
    assert {each.name for each in mentions(coordinator.spec)} == {"demo-secret", "pull"}
