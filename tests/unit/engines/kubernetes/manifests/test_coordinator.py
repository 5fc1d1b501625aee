"""The objects for a coordinator, and the rules for access to pods."""

from __future__ import annotations

from typing import Any

import pytest
from rendered import of, rendered, spec

from rekindle.engines.kubernetes.manifests.coordinator import owned

JOB = {"rekindle.dev/job": "demo"}


def test_one_coordinator_at_a_time() -> None:
    """A new coordinator starts after the end of the old one, with the folder of its journal."""
    found = of(rendered(), "Deployment")
    assert (found["spec"]["replicas"], found["spec"]["strategy"]) == (1, {"type": "Recreate"})
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        *("python", "-m", "rekindle.coordinator.pod_process"),
        *("--directory", "/var/lib/rekindle/jobs/demo"),
        *("--described", "/etc/rekindle/job", "--port", "29600"),
    ]
    assert container["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert found["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("claim", "kept"),
    [("", {"emptyDir": {}}), ("record", {"persistentVolumeClaim": {"claimName": "record"}})],
)
def test_where_the_record_is_kept(claim: str, kept: dict[str, Any]) -> None:
    """If the settings name a claim, the coordinator keeps its journal there."""
    found = of(rendered(coordinator={"claim": claim, "image": "other"}), "Deployment")
    inside = found["spec"]["template"]["spec"]
    assert inside["volumes"][0] == {"name": "record"} | kept
    assert inside["containers"][0]["image"] == "other"


def test_the_services_select_by_role() -> None:
    """The coordinator's Service selects the coordinator, and the headless one selects all nodes.

    The headless Service includes nodes that are not ready.
    """
    found = rendered()
    coordinator = of(found, "Service", "demo-coordinator")["spec"]
    assert coordinator["selector"] == JOB | {"rekindle.dev/role": "coordinator"}
    assert coordinator["ports"] == [{"name": "http", "port": 29600, "targetPort": "http"}]
    nodes = of(found, "Service", "demo-nodes")["spec"]
    assert nodes["selector"] == JOB | {"rekindle.dev/role": "worker"}
    assert (nodes["clusterIP"], nodes["publishNotReadyAddresses"]) == ("None", True)


def test_who_may_reach_whom() -> None:
    """Pods of the job reach each other; they, flows and named peers reach the coordinator."""
    peers = [{"namespace": "flows", "labels": {"a": "b"}}, {"cidr": "10.0.0.0/8"}]
    found = rendered(coordinator={"peers": peers})
    (rule,) = of(found, "NetworkPolicy", "demo-coordinator")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 29600}]
    assert rule["from"] == [
        {"podSelector": {"matchLabels": JOB}},
        {"podSelector": {"matchLabels": {"rekindle.dev/role": "flow"}}},
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "flows"}},
            "podSelector": {"matchLabels": {"a": "b"}},
        },
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
    ]
    (rule,) = of(found, "NetworkPolicy", "demo-nodes")["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": JOB}}]}


@pytest.mark.parametrize("fields", [{"host_network": True}, {"network_policy": False}])
def test_no_policy_where_none_can_hold(fields: dict[str, Any]) -> None:
    """With the host network there is no NetworkPolicy, because it would exclude the job's pods."""
    found = rendered(**fields)
    assert not [one for one in found.every if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("kind", ["indexed-job", "trainjob", "ascendjob"])
def test_all_go_with_the_root(kind: str) -> None:
    """Every other object can have the ConfigMap, which is the first object, as owner."""
    found = rendered(kind, job=spec(job_id="x.y"))
    assert found.every[0] is found.root
    name = found.root["metadata"]["name"]
    for one in found.every[1:]:
        new = owned(one, "u-1")
        (reference,) = new["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["name"], reference["uid"]) == (
            "ConfigMap",
            name,
            "u-1",
        )
        assert "ownerReferences" not in one["metadata"]


def test_a_changed_description_is_seen() -> None:
    """The label of root and workload follows the description, not the attempt."""
    key = "rekindle.dev/described"
    marks = [
        rendered(job=job, avoid=avoid).root["metadata"]["labels"][key]
        for job, avoid in ((spec(), ()), (spec(), ("n1",)), (spec(nodes=3), ()))
    ]
    assert marks[0] == marks[1] != marks[2]
    assert rendered().workload["metadata"]["labels"][key] == marks[0]
