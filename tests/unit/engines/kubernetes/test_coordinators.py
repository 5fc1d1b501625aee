"""The objects around a workload: the coordinator's, and who may reach whom."""

from __future__ import annotations

from typing import Any

import pytest
from rendered import of, rendered, spec

from rekindle.engines.kubernetes.manifests.coordinator import owned

JOB = {"rekindle.dev/job": "demo"}


def test_one_coordinator_at_a_time() -> None:
    """A new coordinator comes when the old one is gone, and is told where its record is."""
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
    """The record is in a claim, if one is named."""
    found = of(rendered(coordinator={"claim": claim, "image": "other"}), "Deployment")
    inside = found["spec"]["template"]["spec"]
    assert inside["volumes"][0] == {"name": "record"} | kept
    assert inside["containers"][0]["image"] == "other"


def test_the_services_select_by_role() -> None:
    """The coordinator's Service finds it alone; the headless one the nodes, ready or not."""
    found = rendered()
    coordinator = of(found, "Service", "demo-coordinator")["spec"]
    assert coordinator["selector"] == JOB | {"rekindle.dev/role": "coordinator"}
    assert coordinator["ports"] == [{"name": "http", "port": 29600, "targetPort": "http"}]
    nodes = of(found, "Service", "demo-nodes")["spec"]
    assert nodes["selector"] == JOB | {"rekindle.dev/role": "worker"}
    assert (nodes["clusterIP"], nodes["publishNotReadyAddresses"]) == ("None", True)


def test_who_may_reach_whom() -> None:
    """The job's pods reach each other; they, flows and those who are named the coordinator."""
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


@pytest.mark.parametrize("said", [{"host_network": True}, {"network_policy": False}])
def test_no_policy_where_none_can_hold(said: dict[str, Any]) -> None:
    """Pods in their hosts' network would be locked out by a policy that names pods."""
    found = rendered(**said)
    assert not [one for one in found.every if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("kind", ["indexed-job", "trainjob", "ascendjob"])
def test_all_go_with_the_root(kind: str) -> None:
    """Every other object can be owned by the ConfigMap, which comes first."""
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
    """Root and workload bear a mark that follows the description, not the attempt."""
    key = "rekindle.dev/described"
    marks = [
        rendered(job=job, avoid=avoid).root["metadata"]["labels"][key]
        for job, avoid in ((spec(), ()), (spec(), ("n1",)), (spec(nodes=3), ()))
    ]
    assert marks[0] == marks[1] != marks[2]
    assert rendered().workload["metadata"]["labels"][key] == marks[0]
