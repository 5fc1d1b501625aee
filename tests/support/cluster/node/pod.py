"""One pod on its node, from its first status to its last."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from cluster import clock, events, kinds
from cluster.node import environment, probes, tasks
from cluster.node.api import Api
from cluster.node.container import Around, Container
from cluster.node.environment import CannotConfigure
from cluster.node.volumes import Volumes

Object = dict[str, Any]


class Kit(msgspec.Struct, frozen=True):
    """The objects that all pods of a kubelet share."""

    api: Api
    session: aiohttp.ClientSession
    root: Path
    mark: str
    scale: float
    new_address: Callable[[], str]


class Pod:
    """Run a pod and report its status to the server."""

    def __init__(self, kit: Kit, pod: Object) -> None:
        self.kit = kit
        self.pod = pod
        metadata = pod["metadata"]
        self.uid: str = metadata["uid"]
        self.key = (metadata["namespace"], metadata["name"])
        self.path = f"/api/v1/namespaces/{self.key[0]}/pods/{self.key[1]}"
        self.folder = kit.root / "pods" / self.uid
        self.folder.mkdir(parents=True, exist_ok=True)
        status = pod.get("status") or {}
        own = "127.0.0.1" if pod["spec"].get("hostNetwork") else kit.new_address()
        self._address = status.get("podIP") or own
        self._started = status.get("startTime") or clock.stamp()
        status.update(podIP=self._address, hostIP="127.0.0.1")
        pod["status"] = status
        self._changed = asyncio.Event()
        self._volumes = Volumes(kit.root, self.folder, pod, self._lookup)
        self.containers = self._make("containers", "containerStatuses")
        self.inits = self._make("initContainers", "initContainerStatuses")
        self._initialized = not self.inits
        self._reported: Object | None = None
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._tell())]

    def container(self, name: str) -> Container | None:
        return next((each for each in (*self.containers, *self.inits) if each.name == name), None)

    def update(self, pod: Object) -> None:
        """Apply a new version of the pod from the server."""
        self.pod["metadata"].update(pod["metadata"])
        if "deletionTimestamp" in pod["metadata"] and not self._ending:
            self._ending = True
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            self._tasks.append(asyncio.create_task(self._end(float(grace))))

    async def drop(self) -> None:
        """Kill the pod without a report: the server has deleted it, or its node is down."""
        for container in (*self.containers, *self.inits):
            container.kill()
        await tasks.end(self._tasks)
        for container in (*self.containers, *self.inits):
            container.kill()
            container.ended.set()

    def remove(self) -> None:
        """Remove the files of the pod."""
        self._volumes.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, group: str, statuses: str) -> list[Container]:
        known = {each["name"]: each for each in self.pod["status"].get(statuses) or []}
        around = Around(
            folder=self.folder,
            root=self.kit.root,
            mark=f"{self.kit.mark}/{self.uid}",
            scale=self.kit.scale,
            variables=self._variables,
            mounts=self._volumes.mounts,
            changed=self._changed.set,
            event=self._event,
        )
        return [
            Container(spec, self.pod, around, known.get(spec["name"]))
            for spec in self.pod["spec"].get(group) or []
        ]

    def _event(self, reason: str, message: str) -> None:
        """Report a warning event in the background. The end of the pod cancels an open report."""
        made = events.make(kinds.PODS, self.pod, "Warning", reason, message)
        path = f"/api/v1/namespaces/{self.key[0]}/events"
        self._tasks.append(asyncio.create_task(self._post(path, made)))

    async def _post(self, path: str, thing: Object) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.kit.api.call("POST", path, thing), 5)

    async def _run(self) -> None:
        self._changed.set()
        reported = False
        while True:
            try:
                await self._volumes.make()
                break
            except CannotConfigure as error:
                if not reported:
                    self._event("FailedMount", f"MountVolume.SetUp failed: {error}")
                reported = True
                await asyncio.sleep(0.3)
        for container in self.inits:
            await container.run()
            if container.exit_code:
                for each in self.containers:
                    each.state = {"waiting": {"reason": "PodInitializing"}}
                self._changed.set()
                return
        self._initialized = True
        await asyncio.gather(*map(self._run_container, self.containers))

    async def _run_container(self, container: Container) -> None:
        probing = None
        if "readinessProbe" in container.spec:

            def tell(ready: bool) -> None:
                container.ready = ready
                self._changed.set()

            probing = asyncio.create_task(
                probes.watch(self.kit.session, container.spec, self._address, tell, self.kit.scale)
            )
            self._tasks.append(probing)  # one cancellation can get lost: `drop` awaits the end
        try:
            await container.run()
        finally:
            if probing:
                probing.cancel()

    async def _end(self, grace: float) -> None:
        everyone = (*self.containers, *self.inits)
        await asyncio.gather(*(each.stop(grace) for each in everyone))
        running = [each for each in everyone if each.is_running]
        await asyncio.gather(*(each.ended.wait() for each in running))
        for each in everyone:
            if "waiting" in each.state and self.pod["status"].get("phase") == "Running":
                each.state = each.last_state or each.state
        await tasks.end(self._tasks[:2])
        for each in everyone:
            each.kill()
        await self._push(self._status(last=True))
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        await self.kit.api.call("DELETE", self.path, options)

    async def _tell(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            status = self._status()
            if status != self._reported:
                await self._push(status)

    async def _push(self, status: Object) -> None:
        self._reported = status
        patch = {"metadata": {"uid": self.uid}, "status": status}
        await self.kit.api.patch(f"{self.path}/status", patch)

    def _status(self, last: bool = False) -> Object:
        phase = self._phase(last)
        over = phase in ("Succeeded", "Failed")
        ready = not over and all(each.status()["ready"] for each in self.containers)
        reason = {"reason": "PodCompleted"} if phase == "Succeeded" else {"reason": "PodFailed"}
        why = {} if ready else reason if over else {"reason": "ContainersNotReady"}
        conditions = [
            {"type": "PodReadyToStartContainers", "status": "False" if over else "True"},
            {"type": "Initialized", "status": "True" if self._initialized else "False"},
            {"type": "ContainersReady", "status": str(ready), **why},
            {"type": "Ready", "status": str(ready), **why},
        ]
        self._stamp(conditions)
        status: Object = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "startTime": self._started,
            "conditions": conditions,
            "containerStatuses": [each.status() for each in self.containers],
        }
        if self.inits:
            status["initContainerStatuses"] = [each.status() for each in self.inits]
        self.pod["status"]["phase"] = phase
        return status

    def _stamp(self, conditions: list[Object]) -> None:
        known = {each["type"]: each for each in (self._reported or {}).get("conditions", [])}
        for each in conditions:
            old = known.get(each["type"])
            if old and old["status"] == each["status"]:
                each["lastTransitionTime"] = old["lastTransitionTime"]
            else:
                each["lastTransitionTime"] = clock.stamp()

    def _phase(self, last: bool) -> str:
        for each in self.inits:
            if each.finished and each.exit_code:
                return "Failed"
        codes = [each.exit_code for each in self.containers]
        over = last or all(each.finished for each in self.containers)
        if over and None not in codes:
            return "Failed" if any(codes) else "Succeeded"
        if last:
            return "Failed"
        if all("waiting" in each.state and not each.restarts for each in self.containers):
            return "Pending"
        return "Running"

    async def _variables(self, spec: Object) -> dict[str, str]:
        return await environment.variables(self.pod, spec, self._lookup)

    async def _lookup(self, kind: str, name: str) -> Object | None:
        place = f"/api/v1/namespaces/{self.key[0]}"
        if kind == "tokens":
            path = f"{place}/serviceaccounts/{name}/token"
            code, found = await self.kit.api.call("POST", path, {"spec": {}})
            return found["status"] if code == 201 else None
        code, found = await self.kit.api.call("GET", f"{place}/{kind}/{name}")
        return found if code == 200 else None


async def forget(api: Api, pod: Object) -> None:
    """Delete a pod that has no process on this node."""
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    if pod["status"].get("phase") not in ("Succeeded", "Failed"):
        patch = {"metadata": {"uid": metadata["uid"]}, "status": {"phase": "Failed"}}
        await api.patch(f"{path}/status", patch)
    with contextlib.suppress(KeyError):
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        await api.call("DELETE", path, options)
