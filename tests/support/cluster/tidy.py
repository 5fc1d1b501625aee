"""Restore a shared cluster after tests: its server, its nodes and its cluster-wide objects."""

from __future__ import annotations

from cluster.launch import Simulated
from cluster.manifests import Object

_NODES = "/api/v1/nodes"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_KEPT = ("default", "kube-system", "kube-public", "kube-node-lease")
_PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure")


def tidy(cluster: Simulated) -> None:
    """Start the server, make all nodes ready and schedulable, and delete the objects of tests."""
    cluster.ensure_server()
    cluster.clear_faults()
    for node in cluster.get(_NODES)["items"]:
        free(cluster, node)
    for plural in ("clusterroles", "clusterrolebindings"):
        _empty(cluster, f"{_RBAC}/{plural}")
    for namespace in cluster.get("/api/v1/namespaces")["items"]:
        name = namespace["metadata"]["name"]
        if name not in _KEPT:
            cluster.call("DELETE", f"/api/v1/namespaces/{name}")
            continue
        for plural in ("configmaps", "pods"):
            _empty(cluster, f"/api/v1/namespaces/{name}/{plural}")
        for plural in ("roles", "rolebindings"):
            _empty(cluster, f"{_RBAC}/namespaces/{name}/{plural}")
    cluster.until(_NODES, lambda found: all(map(_is_ready, found.values())))


def free(cluster: Simulated, node: Object) -> None:
    """Make a node ready and schedulable, without pressure conditions. Delete a node of a test."""
    name = node["metadata"]["name"]
    if not cluster.has_node(name):
        cluster.delete(f"{_NODES}/{name}")
        return
    cluster.revive_node(name)
    annotations = dict.fromkeys(node["metadata"].get("annotations") or {})
    spec = {"unschedulable": None, "taints": None}
    cluster.patch(f"{_NODES}/{name}", {"metadata": {"annotations": annotations}, "spec": spec})
    conditions = [each for each in node["status"]["conditions"] if each["type"] == "Ready"]
    conditions += [{"type": kind, "status": "False"} for kind in _PRESSURES]
    cluster.patch(f"{_NODES}/{name}/status", {"status": {"conditions": conditions}})


def _empty(cluster: Simulated, path: str) -> None:
    for each in cluster.get(path)["items"]:
        cluster.call("DELETE", f"{path}/{each['metadata']['name']}?gracePeriodSeconds=0")


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
