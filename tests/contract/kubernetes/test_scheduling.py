"""Test the scheduler: the selection of nodes, and the messages of unschedulable pods."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.manifests import pod
from cluster.spaces import Space

Object = dict[str, Any]

_HOST = "kubernetes.io/hostname"


def unschedulable(space: Space, name: str) -> str:
    """Return the message of the condition that reports the pod as unschedulable."""

    def holds(found: dict[str, Object]) -> str | None:
        for each in found[name]["status"].get("conditions") or []:
            if each["type"] == "PodScheduled" and each["status"] == "False":
                assert each["reason"] == "Unschedulable"
                return str(each["message"])
        return None

    found: str = space.cluster.until(space.pods, holds)
    return found


def node_of(space: Space, name: str) -> str:
    found: str = space.cluster.until(
        space.pods, lambda found: found[name]["spec"].get("nodeName") if name in found else None
    )
    return found


@pytest.fixture
def nodes(space: Space) -> list[str]:
    return [each["metadata"]["name"] for each in space.cluster.get("/api/v1/nodes")["items"]]


def required(*expressions: Object, fields: tuple[Object, ...] = ()) -> Object:
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    terms = {"nodeSelectorTerms": [{key: value for key, value in term.items() if value}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def test_affinity(space: Space, nodes: list[str]) -> None:
    """The scheduler respects the operators and fields of a required node affinity."""
    last = nodes[-1]
    wanted = {
        "in": required({"key": _HOST, "operator": "In", "values": [last]}),
        "not-in": required({"key": _HOST, "operator": "NotIn", "values": nodes[:-1]}),
        "exists": required({"key": _HOST, "operator": "Exists"}),
        "field": required(fields=({"key": "metadata.name", "operator": "In", "values": [last]},)),
    }
    for name, affinity in wanted.items():
        thing = pod(name)
        thing["spec"]["affinity"] = affinity
        space.cluster.create(space.pods, thing)
        assert node_of(space, name) in ([last] if name != "exists" else nodes)
    thing = pod("none")
    thing["spec"]["affinity"] = required({"key": _HOST, "operator": "DoesNotExist"})
    space.cluster.create(space.pods, thing)
    message = unschedulable(space, "none")
    assert f"0/{len(nodes)} nodes are available" in message
    assert "didn't match Pod's node affinity/selector" in message


def test_cordoned_nodes_get_nothing(space: Space, nodes: list[str]) -> None:
    """A cordoned node gets no new pods; after it is uncordoned, it gets the waiting pod."""
    node = f"/api/v1/nodes/{nodes[0]}"
    space.cluster.patch(node, {"spec": {"unschedulable": True}})
    try:
        thing = pod("one")
        thing["spec"]["nodeSelector"] = {_HOST: nodes[0]}
        space.cluster.create(space.pods, thing)
        assert "1 node(s) were unschedulable" in unschedulable(space, "one")
    finally:
        space.cluster.patch(node, {"spec": {"unschedulable": None}})
    assert node_of(space, "one") == nodes[0]


def test_taints_and_tolerations(space: Space, nodes: list[str]) -> None:
    """A NoSchedule taint keeps pods without a matching toleration off the node."""
    taint = {"key": f"example.com/{space.name}", "value": "bad", "effect": "NoSchedule"}
    node = f"/api/v1/nodes/{nodes[0]}"
    space.cluster.patch(node, {"spec": {"taints": [taint]}})
    try:
        for name, tolerations in (
            ("no", []),
            ("yes", [{"key": taint["key"], "operator": "Exists"}]),
        ):
            thing = pod(name)
            thing["spec"]["nodeSelector"] = {_HOST: nodes[0]}
            thing["spec"]["tolerations"] = tolerations
            space.cluster.create(space.pods, thing)
        assert node_of(space, "yes") == nodes[0]
        assert "untolerated taint" in unschedulable(space, "no")
    finally:
        space.cluster.patch(node, {"spec": {"taints": None}})


def test_no_execute_ends_pods(space: Space, nodes: list[str]) -> None:
    """A NoExecute taint ends running pods, and a condition of each pod names the reason."""
    thing = pod("one", "trap 'sleep 1; exit 0' TERM; while :; do sleep 0.1; done")
    thing["spec"]["nodeSelector"] = {_HOST: nodes[0]}
    thing["spec"]["terminationGracePeriodSeconds"] = 20
    space.cluster.create(space.pods, thing)
    space.running(1)
    taint = {"key": f"example.com/{space.name}", "effect": "NoExecute"}
    node = f"/api/v1/nodes/{nodes[0]}"
    reasons: set[str] = set()

    def is_gone(found: dict[str, Object]) -> bool:
        for each in (found.get("one", {}).get("status") or {}).get("conditions") or []:
            if each["type"] == "DisruptionTarget":
                reasons.add(each["reason"])
        return not found

    space.cluster.patch(node, {"spec": {"taints": [taint]}})
    try:
        space.cluster.until(space.pods, is_gone)
    finally:
        space.cluster.patch(node, {"spec": {"taints": None}})
    assert reasons == {"DeletionByTaintManager"}


def test_pods_that_keep_apart(space: Space, nodes: list[str]) -> None:
    """Required anti-affinity by host places one pod on each node; one more pod is unschedulable."""
    term = {"topologyKey": _HOST, "labelSelector": {"matchLabels": {"app": "apart"}}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    names = [f"p{number}" for number in range(len(nodes) + 1)]
    for name in names:
        thing = pod(name, labels={"app": "apart"})
        thing["spec"]["affinity"] = {"podAntiAffinity": apart}
        space.cluster.create(space.pods, thing)
    assert {node_of(space, name) for name in names[:-1]} == set(nodes)
    assert "anti-affinity" in unschedulable(space, names[-1])


@pytest.mark.simulated
def test_extended_resources(space: Space, nodes: list[str]) -> None:
    """A pod is unschedulable if no node has enough of an extended resource."""
    for name in [f"p{number}" for number in range(len(nodes) + 1)]:
        thing = pod(name)
        limits = {"limits": {"example.com/npu": "8"}}
        thing["spec"]["containers"][0]["resources"] = limits
        space.cluster.create(space.pods, thing)
    message = unschedulable(space, f"p{len(nodes)}")
    assert f"{len(nodes)} Insufficient example.com/npu" in message


def test_gates(space: Space) -> None:
    """The scheduler ignores a pod until all its scheduling gates are removed."""
    thing = pod("one")
    thing["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
    space.cluster.create(space.pods, thing)

    def is_gated(found: dict[str, Object]) -> bool:
        conditions = found["one"]["status"].get("conditions") or []
        return any(each.get("reason") == "SchedulingGated" for each in conditions)

    space.cluster.until(space.pods, is_gated)
    space.cluster.patch(f"{space.pods}/one", {"spec": {"schedulingGates": None}})
    assert node_of(space, "one")
