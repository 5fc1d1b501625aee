"""Nodes without heartbeats, and the effects of their taints on pods."""

from __future__ import annotations

import asyncio
import time

from cluster import clock, kinds
from cluster.controllers.fitting import holds, tolerated_for
from cluster.controllers.loop import Controller, Settings, is_deleted
from cluster.deleting import DeleteOptions, delete
from cluster.operations import Operations
from cluster.refusals import Object
from cluster.subresources import disrupt, set_condition

_UNREACHABLE = "node.kubernetes.io/unreachable"
_NOT_READY = "node.kubernetes.io/not-ready"
_OUT = "node.kubernetes.io/out-of-service"
_OWN = (_UNREACHABLE, _NOT_READY)


class Lifecycle(Controller):
    """Check all nodes and pods periodically."""

    kind = kinds.NODES

    def __init__(self, operations: Operations, settings: Settings) -> None:
        super().__init__(operations, settings)
        self._renewed: dict[str, tuple[str, float]] = {}  # by node: time in the lease, age in s
        self._tainted: dict[tuple[str, str], float] = {}  # by pod and taints: when they appeared

    async def run(self) -> None:
        # A node counts as silent after a number of checks. If this process is delayed, the kubelets
        # are too, and a node must not be lost for that.
        pause = min(0.5, self.settings.node_grace / 20)
        while True:
            await asyncio.sleep(pause)
            self._look(pause)

    def _look(self, pause: float) -> None:
        nodes = {node["metadata"]["name"]: node for node in self.store.all(kinds.NODES)}
        for name in list(nodes):
            silent = self._silence(name, pause)
            if silent > self.settings.node_grace:
                self._lose(nodes[name])
            else:
                self._find(nodes[name])
        for pod in list(self.store.all(kinds.PODS)):
            node_name = pod["spec"].get("nodeName")
            if not node_name:
                continue
            node = self.store.look(kinds.NODES, "", node_name)
            if node is None:
                self._orphan(pod, "node not found")
            else:
                self._evict(pod, node)

    def _silence(self, name: str, pause: float) -> float:
        lease = self.store.look(kinds.LEASES, "kube-node-lease", name)
        renewed = lease["spec"].get("renewTime", "") if lease else ""
        known, ago = self._renewed.get(name, ("", 0.0))
        ago = ago + pause if known == renewed else 0.0
        self._renewed[name] = (renewed, ago)
        return ago

    def _lose(self, node: Object) -> None:
        def how(thing: Object) -> None:
            unknown = {
                "type": "Ready",
                "status": "Unknown",
                "reason": "NodeStatusUnknown",
                "message": "Kubelet stopped posting node status.",
            }
            if thing.get("status", {}).get("conditions"):
                set_condition(thing, unknown)
            _set_taints(thing, _UNREACHABLE)

        if _state(node) == "Unknown" and _has_taint(node, _UNREACHABLE):
            return
        self.operations.edit(kinds.NODES, node, how)
        self.operations.event(kinds.NODES, node, "Normal", "NodeNotReady", "node is not ready")
        for pod in list(self.store.all(kinds.PODS)):
            if pod["spec"].get("nodeName") == node["metadata"]["name"] and holds(pod):
                condition = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
                self.operations.edit(
                    kinds.PODS, pod, lambda thing, value=condition: set_condition(thing, value)
                )

    def _find(self, node: Object) -> None:
        state = _state(node)
        wanted = {"True": "", "False": _NOT_READY}.get(state)
        if wanted is None:
            return  # the kubelet will report itself
        present = [each for each in _OWN if _has_taint(node, each)]
        if present != ([wanted] if wanted else []):
            self.operations.edit(kinds.NODES, node, lambda thing: _set_taints(thing, wanted))

    def _evict(self, pod: Object, node: Object) -> None:
        taints = [
            each for each in node["spec"].get("taints") or [] if each["effect"] == "NoExecute"
        ]
        key = pod["metadata"]["uid"]
        if not taints or not holds(pod):
            for known in [each for each in self._tainted if each[0] == key]:
                del self._tainted[known]
            return
        if is_deleted(pod):
            if _has_taint(node, _OUT) and _state(node) != "True":
                self._orphan(pod, "out-of-service taint")
            return
        allowed = tolerated_for(pod["spec"], taints)
        if allowed is None:
            return
        names = ",".join(sorted(each["key"] for each in taints))
        since = self._tainted.setdefault((key, names), time.monotonic())
        if time.monotonic() - since >= self.scaled(allowed):
            text = "Taint manager: deleting due to NoExecute taint"
            disrupt(self.operations, pod, "DeletionByTaintManager", text)
            self._delete(pod, None)

    def _orphan(self, pod: Object, why: str) -> None:
        """Fail and delete a pod whose node cannot stop its processes."""
        if holds(pod):
            text = f"PodGC: {why}"
            disrupt(self.operations, pod, "DeletionByPodGC", text)
            self.operations.set_status(kinds.PODS, pod, phase="Failed")
        self._delete(pod, 0)

    def _delete(self, pod: Object, grace: int | None) -> None:
        metadata = pod["metadata"]
        if self.store.look(kinds.PODS, metadata["namespace"], metadata["name"]) is not None:
            options = DeleteOptions(grace=grace, policy="Background")
            delete(self.operations, kinds.PODS, metadata["namespace"], metadata["name"], options)


def _state(node: Object) -> str:
    for each in (node.get("status") or {}).get("conditions") or []:
        if each["type"] == "Ready":
            return str(each["status"])
    return "True"  # a node without a kubelet


def _has_taint(node: Object, key: str) -> bool:
    return any(each["key"] == key for each in node["spec"].get("taints") or [])


def _set_taints(node: Object, wanted: str) -> None:
    """Replace the taints that this controller sets by the wanted one, or by none."""
    kept = [each for each in node["spec"].get("taints") or [] if each["key"] not in _OWN]
    if wanted:
        kept.append({"key": wanted, "effect": "NoSchedule"})
        kept.append({"key": wanted, "effect": "NoExecute", "timeAdded": clock.stamp()})
    node["spec"].pop("taints", None)
    if kept:
        node["spec"]["taints"] = kept
