"""Volcano's Jobs and the Commands to them."""

from __future__ import annotations

import contextlib

from cluster import clock, kinds
from cluster.controllers import podgroups, pods, volcano_policy
from cluster.controllers.loop import Controller, Key, Settings, controller_of, is_deleted
from cluster.deleting import delete
from cluster.operations import Operations
from cluster.refusals import Object, Refused
from cluster.store import Event, fresh

_LABELS = "volcano.sh/"
_OVER = ("Completed", "Failed", "Terminated", "Aborted")
_ENDING = {"Aborting": "Aborted", "Terminating": "Terminated", "Completing": "Completed"}
_ORDERS = {"AbortJob": "Aborting", "TerminateJob": "Terminating", "CompleteJob": "Completing"}


class VolcanoJobs(Controller):
    """Every restart counts against maxRetry, whatever it restarts."""

    kind = kinds.VOLCANOJOBS
    owned = (kinds.PODS,)

    def __init__(self, operations: Operations, settings: Settings) -> None:
        super().__init__(operations, settings)
        self._handled: set[tuple[str, str]] = set()
        self._evicted: dict[Key, list[Object]] = {}
        self.orders: dict[Key, list[str]] = {}

    def hear(self, event: Event) -> None:
        """Pods that somebody deleted are evicted."""
        if event.kind is kinds.PODS and event.after is None:
            owner = controller_of(event.newest)
            if owner and (owner["kind"], owner["apiVersion"]) == (
                self.kind.kind,
                self.kind.api_version,
            ):
                key = (event.newest["metadata"]["namespace"], owner["name"])
                self._evicted.setdefault(key, []).append(event.newest)
        super().hear(event)

    def sync(self, namespace: str, name: str) -> None:
        job = self.store.get(self.kind, namespace, name)
        evicted = self._evicted.pop((namespace, name), [])
        orders = self.orders.pop((namespace, name), [])
        if job is None or is_deleted(job):
            return
        status = fresh(job.get("status") or {})
        status.setdefault("state", {"phase": "Pending", "lastTransitionTime": clock.stamp()})
        status.setdefault("minAvailable", job["spec"].get("minAvailable", 1))
        for order in orders:
            self._act(job, status, order, None)
        mine = self._mine(job)
        phase = status["state"]["phase"]
        if phase in ("Pending", "Running"):
            for action, pod in self._happened(job, status, mine, evicted):
                if status["state"]["phase"] not in ("Pending", "Running"):
                    break
                self._act(job, status, action, pod)
        phase = status["state"]["phase"]
        if phase in _ENDING or phase == "Restarting":
            self._go_on(job, status)
        elif phase in ("Pending", "Running"):
            self._run(job, status)
        self._tell(job, status)

    def _happened(
        self, job: Object, status: Object, mine: list[Object], evicted: list[Object]
    ) -> list[tuple[str, Object]]:
        """The actions that what happened to pods asks for; each happens once."""
        found = []
        version = status.get("version", 0)
        happened = [("PodEvicted", pod) for pod in evicted if pods.phase(pod) != "Succeeded"]
        happened += [
            ("PodFailed", pod)
            for pod in mine
            if pods.phase(pod) == "Failed" and not is_deleted(pod)
        ]
        for event, pod in happened:
            key = (pod["metadata"]["uid"], event)
            told = (pod["metadata"].get("annotations") or {}).get(_LABELS + "job-version", "0")
            if key in self._handled or int(told) < version:
                continue
            self._handled.add(key)
            action = volcano_policy.action(job, _task_of(pod), event, pods.exit_codes(pod))
            if action:
                found.append((action, pod))
        for task in job["spec"]["tasks"]:
            them = [pod for pod in mine if _task_of(pod) == task["name"]]
            done = [pod for pod in them if pods.phase(pod) == "Succeeded"]
            if task["replicas"] and len(done) == task["replicas"]:
                key = (job["metadata"]["uid"], f"{task['name']} {version}")
                action = volcano_policy.action(job, task["name"], "TaskCompleted", {})
                if action and key not in self._handled:
                    self._handled.add(key)
                    found.append((action, done[0]))
        return found

    def _act(self, job: Object, status: Object, action: str, pod: Object | None) -> None:
        phase = status["state"]["phase"]
        if action == "ResumeJob" and phase in ("Aborted", "Aborting"):
            self._restart(job, status, self._mine(job))
        elif action in _ORDERS and phase not in _OVER:
            _enter(status, _ORDERS[action])
            self._kill(self._mine(job))
        elif action.startswith("Restart") and phase not in _OVER:
            mine = self._mine(job)
            if action == "RestartTask" and pod is not None:
                mine = [each for each in mine if _task_of(each) == _task_of(pod)]
            elif action == "RestartPod" and pod is not None:
                mine = [each for each in mine if each["metadata"]["uid"] == pod["metadata"]["uid"]]
            self._restart(job, status, mine)

    def _restart(self, job: Object, status: Object, them: list[Object]) -> None:
        status["retryCount"] = status.get("retryCount", 0) + 1
        status["version"] = status.get("version", 0) + 1
        _enter(status, "Restarting")
        # Whichever is killed now must not be taken for evicted.
        for pod in them:
            self._handled.add((pod["metadata"]["uid"], "PodEvicted"))
            self._handled.add((pod["metadata"]["uid"], "PodFailed"))
        self._kill(them)

    def _kill(self, them: list[Object]) -> None:
        for pod in them:
            self._handled.add((pod["metadata"]["uid"], "PodEvicted"))
            pods.remove(self.operations, pod)

    def _go_on(self, job: Object, status: Object) -> None:
        """Once those that are killed are gone."""
        phase = status["state"]["phase"]
        mine = self._mine(job)
        if phase in _ENDING:
            if not any(pods.phase(pod) in ("Running", "Pending") for pod in mine):
                _enter(status, _ENDING[phase])
        elif not any(map(is_deleted, mine)):
            if status["retryCount"] >= job["spec"].get("maxRetry", 3):
                _enter(status, "Failed")
                self._kill([pod for pod in mine if pods.is_active(pod)])
            else:
                _enter(status, "Pending")
                self._run(job, status)

    def _run(self, job: Object, status: Object) -> None:
        metadata, spec = job["metadata"], job["spec"]
        least = spec.get("minAvailable") or sum(each["replicas"] for each in spec["tasks"])
        queue = spec.get("queue", "default")
        podgroups.ensure(self.operations, self.kind, job, least, queue)
        for task in spec["tasks"]:
            for index in range(task["replicas"]):
                name = f"{metadata['name']}-{task['name']}-{index}"
                if self.store.look(kinds.PODS, metadata["namespace"], name) is None:
                    pod = self._pod(job, status, task, index, name)
                    if not pods.create(self.operations, self.kind, job, pod):
                        self.again((metadata["namespace"], metadata["name"]), 0.3)
            for pod in self._mine(job):
                index = pods.index_of(pod, _LABELS + "task-index")
                if _task_of(pod) == task["name"] and index >= task["replicas"]:
                    self._kill([pod])
        mine = self._mine(job)
        total = sum(each["replicas"] for each in spec["tasks"])
        succeeded = sum(pods.phase(pod) == "Succeeded" for pod in mine)
        failed = sum(pods.phase(pod) == "Failed" for pod in mine)
        running = sum(pods.phase(pod) == "Running" for pod in mine)
        if status["state"]["phase"] == "Pending" and running + succeeded >= min(least, total):
            _enter(status, "Running")
        wanted = spec.get("minSuccess") or least
        if total and succeeded + failed >= total:
            _enter(status, "Completed" if succeeded >= wanted else "Failed")

    def _pod(self, job: Object, status: Object, task: Object, index: int, name: str) -> Object:
        metadata, spec = job["metadata"], job["spec"]
        pod = pods.make(self.kind, job, task.get("template") or {}, name)
        labels = {
            "job-name": metadata["name"],
            "job-namespace": metadata["namespace"],
            "task-spec": task["name"],
            "task-index": str(index),
            "queue-name": spec.get("queue", "default"),
        }
        pods.label(pod, **{_LABELS + key: value for key, value in labels.items()})
        annotations = pod["metadata"].setdefault("annotations", {})
        annotations[_LABELS + "job-version"] = str(status.get("version", 0))
        annotations["scheduling.k8s.io/group-name"] = podgroups.name_of(job)
        pod["spec"].setdefault("schedulerName", spec.get("schedulerName", "volcano"))
        plugins = spec.get("plugins") or {}
        if "svc" in plugins:
            pod["spec"].setdefault("hostname", name)
            pod["spec"].setdefault("subdomain", metadata["name"])
        if "env" in plugins:
            values = {"VK_TASK_INDEX": str(index), "VC_TASK_INDEX": str(index)}
            pods.add_environment(pod, values)
        return pod

    def _tell(self, job: Object, status: Object) -> None:
        mine = self._mine(job)
        for field in ("Pending", "Running", "Succeeded", "Failed"):
            count = sum(pods.phase(pod) == field for pod in mine)
            status[field.lower()] = count or None
        status["terminating"] = sum(map(is_deleted, mine)) or None
        found: dict[str, dict[str, dict[str, int]]] = {}
        for pod in mine:
            phases = found.setdefault(_task_of(pod), {"phase": {}})["phase"]
            phases[pods.phase(pod)] = phases.get(pods.phase(pod), 0) + 1
        status["taskStatusCount"] = found or None
        self.operations.set_status(self.kind, job, **status)

    def _mine(self, job: Object) -> list[Object]:
        return pods.owned(self.store, job["metadata"]["uid"], job["metadata"]["namespace"])


class Commands(Controller):
    """Takes each command once, and hands it to the job that it names."""

    kind = kinds.COMMANDS

    def __init__(self, operations: Operations, settings: Settings, jobs: VolcanoJobs) -> None:
        super().__init__(operations, settings)
        self._jobs = jobs

    def sync(self, namespace: str, name: str) -> None:
        command = self.store.get(kinds.COMMANDS, namespace, name)
        if command is None:
            return
        with contextlib.suppress(Refused):
            delete(self.operations, kinds.COMMANDS, namespace, name)
        key = (namespace, command["target"]["name"])
        self._jobs.orders.setdefault(key, []).append(command["action"])
        self._jobs.enqueue(key)


def _task_of(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(_LABELS + "task-spec", ""))


def _enter(status: Object, phase: str) -> None:
    now = clock.stamp()
    status["state"] = {"phase": phase, "lastTransitionTime": now}
    conditions = status.setdefault("conditions", [])
    conditions.append({"status": phase, "lastTransitionTime": now})
