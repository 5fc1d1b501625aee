"""One node: its Node object, its lease and its pods."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from cluster import clock
from cluster.node import tasks
from cluster.node.pod import Kit, Pod, forget

Object = dict[str, Any]

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CONDITIONS = [
    ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID"),
    ("Ready", "True", "KubeletReady"),
]


class Machine:
    """A simulated machine."""

    def __init__(
        self, kit: Kit, name: str, labels: dict[str, str], capacity: dict[str, str], beat: float
    ) -> None:
        self.kit = kit
        self.name = name
        self.labels = labels
        self.capacity = capacity
        self.beat = beat
        self.port = 0
        self.pods: dict[str, Pod] = {}  # by uid
        self.is_down = False
        self._beating: asyncio.Task[None] | None = None

    async def register(self, port: int) -> None:
        self.port = port
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.labels,
        }
        node = {"metadata": {"name": self.name, "labels": labels}, "status": self._status()}
        code, _ = await self.kit.api.call("POST", "/api/v1/nodes", node)
        if code == 409:
            await self._tell_ready()
        self._beating = asyncio.create_task(self._beat())

    async def crash(self) -> None:
        """Kill the processes of the node and stop its heartbeats, without a report."""
        self.is_down = True
        if self._beating:
            await tasks.end([self._beating])
        pods, self.pods = list(self.pods.values()), {}
        await asyncio.gather(*(pod.drop() for pod in pods))

    async def come_back(self, pods: list[Object]) -> None:
        """Restart the node, with the pods that the server still assigns to it."""
        if not self.is_down:
            return
        self.is_down = False
        await self._tell_ready()
        self._beating = asyncio.create_task(self._beat())
        for pod in pods:
            await self.see(pod)

    async def see(self, pod: Object) -> None:
        """Apply the state of a pod of this node on the server."""
        if self.is_down:
            return
        uid = pod["metadata"]["uid"]
        if uid in self.pods:
            self.pods[uid].update(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            if pod["metadata"].get("deletionGracePeriodSeconds"):
                await forget(self.kit.api, pod)
        elif (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            self.pods[uid] = Pod(self.kit, pod)
            self.pods[uid].start()

    async def lose(self, uid: str) -> None:
        """Remove a pod that the server has deleted."""
        if pod := self.pods.pop(uid, None):
            await pod.drop()
            pod.remove()

    async def close(self) -> None:
        await self.crash()

    async def _beat(self) -> None:
        path = f"{_LEASES}/{self.name}"
        while True:
            spec = {
                "holderIdentity": self.name,
                "leaseDurationSeconds": 40,
                "renewTime": clock.micro(),
            }
            code, _ = await self.kit.api.patch(path, {"spec": spec})
            if code == 404:
                lease = {"metadata": {"name": self.name}, "spec": spec}
                await self.kit.api.call("POST", _LEASES, lease)
            code, node = await self.kit.api.call("GET", f"/api/v1/nodes/{self.name}")
            if code == 200 and not _is_ready(node):
                await self._tell_ready()
            await asyncio.sleep(self.beat)

    async def _tell_ready(self) -> None:
        path = f"/api/v1/nodes/{self.name}"
        with contextlib.suppress(KeyError):
            await self.kit.api.patch(f"{path}/status", {"status": self._status()})

    def _status(self) -> Object:
        now = clock.stamp()
        conditions = [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": "kubelet is posting ready status" if kind == "Ready" else "",
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }
            for kind, status, reason in _CONDITIONS
        ]
        return {
            "capacity": self.capacity,
            "allocatable": self.capacity,
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "nodeInfo": {"kubeletVersion": "v1.36.0-rekindle-test", "operatingSystem": "linux"},
        }


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
