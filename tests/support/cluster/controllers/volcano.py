"""The controller of Volcano's Jobs, without policies. It replaces missing pods."""

from __future__ import annotations

from cluster import clock, kinds
from cluster.controllers import podgroups, pods
from cluster.controllers.loop import Controller, is_deleted
from cluster.refusals import Object
from cluster.store import fresh

_LABELS = "volcano.sh/"


class VolcanoJobs(Controller):
    """Keep failed pods. The job ends once all its pods have ended."""

    kind = kinds.VOLCANOJOBS
    owned = (kinds.PODS,)

    def sync(self, namespace: str, name: str) -> None:
        job = self.store.get(self.kind, namespace, name)
        if job is None or is_deleted(job):
            return
        status = fresh(job.get("status") or {})
        status.setdefault("state", {"phase": "Pending", "lastTransitionTime": clock.stamp()})
        status.setdefault("minAvailable", job["spec"].get("minAvailable", 1))
        if status["state"]["phase"] in ("Pending", "Running"):
            self._run(job, status)
        self._tell(job, status)

    def _run(self, job: Object, status: Object) -> None:
        metadata, spec = job["metadata"], job["spec"]
        least = spec.get("minAvailable") or sum(each["replicas"] for each in spec["tasks"])
        queue = spec.get("queue", "default")
        podgroups.ensure(self.operations, self.kind, job, least, queue)
        for task in spec["tasks"]:
            for index in range(task["replicas"]):
                name = f"{metadata['name']}-{task['name']}-{index}"
                if self.store.look(kinds.PODS, metadata["namespace"], name) is None:
                    pod = self._pod(job, task, index, name)
                    if pods.create(self.operations, self.kind, job, pod):
                        self.again((metadata["namespace"], metadata["name"]), 0.3)
            for pod in self._mine(job):
                index = pods.index_of(pod, _LABELS + "task-index")
                if _task_of(pod) == task["name"] and index >= task["replicas"]:
                    pods.remove(self.operations, pod)
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

    def _pod(self, job: Object, task: Object, index: int, name: str) -> Object:
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
        annotations[_LABELS + "job-version"] = "0"
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


def _task_of(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(_LABELS + "task-spec", ""))


def _enter(status: Object, phase: str) -> None:
    now = clock.stamp()
    status["state"] = {"phase": phase, "lastTransitionTime": now}
    conditions = status.setdefault("conditions", [])
    conditions.append({"status": phase, "lastTransitionTime": now})
