"""The common part of AscendJobs and PyTorchJobs: a leader, workers and a list of conditions."""

from __future__ import annotations

from cluster import clock, kinds
from cluster.controllers import pods
from cluster.controllers.loop import Controller, condition, is_deleted
from cluster.refusals import Object
from cluster.store import fresh

_TERMINAL = ("Succeeded", "Failed")


class Replicas(Controller):
    """Keep one pod for each index of each type. A new pod has the name of the deleted one."""

    owned = (kinds.PODS,)
    type_label = ""
    index_label = ""

    def replicas(self, job: Object) -> dict[str, Object]:
        """Return the replica specs by type."""
        raise NotImplementedError

    def leads(self, job: Object, kind: str) -> bool:
        """Return whether the success of the job depends on the pods of this type."""
        raise NotImplementedError

    def dress(self, job: Object, kind: str, index: int, pod: Object) -> None:
        """Add the labels, annotations and variables of the kind to a new pod."""
        raise NotImplementedError

    def refuses(self, job: Object) -> tuple[str, str] | None:
        """Return reason and message if the job is invalid, otherwise None."""
        return None

    def before(self, job: Object, status: Object) -> bool:
        """Do the special steps of the kind. Return whether the reconciliation continues."""
        return True

    def on_end(self, job: Object) -> None:
        """Remove additional objects of an ended job."""

    def sync(self, namespace: str, name: str) -> None:
        job = self.store.get(self.kind, namespace, name)
        if job is None or is_deleted(job):
            return
        status = fresh(job.get("status") or {})
        if any(condition(job, each) for each in _TERMINAL):
            self._clean_up(job, status)
            return
        if problem := self.refuses(job):
            self._refuse(job, status, *problem)
            return
        if not status.get("conditions"):
            text = f"{self.kind.kind} {name} is created."
            set_state(status, "Created", f"{self.kind.kind}Created", text)
        if self.before(job, status):
            self._look(job, status)
        self._tell(job, status)

    def _refuse(self, job: Object, status: Object, reason: str, message: str) -> None:
        before = fresh(status)
        set_state(status, "Created", reason, message, true=False)
        if status != before:
            self.operations.set_status(self.kind, job, **status)
            self.operations.event(self.kind, job, "Warning", reason, message)

    def mine(self, job: Object) -> list[Object]:
        return pods.owned(self.store, job["metadata"]["uid"], job["metadata"]["namespace"])

    def fail(self, job: Object, status: Object, why: str, reason: str = "JobFailed") -> None:
        set_state(status, "Failed", reason, why)
        status["completionTime"] = clock.stamp()
        self.operations.event(self.kind, job, "Warning", reason, why)

    def _look(self, job: Object, status: Object) -> None:
        name = job["metadata"]["name"]
        mine = self.mine(job)
        failed = [pod for pod in mine if pods.phase(pod) == "Failed" and not is_deleted(pod)]
        if failed:
            text = f"{self.kind.kind} {name} is failed because {len(failed)} replica(s) failed."
            self.fail(job, status, text)
            return
        if self._has_succeeded(job, mine):
            text = f"{self.kind.kind} {name} successfully completed."
            set_state(status, "Succeeded", "JobSucceeded", text)
            status["completionTime"] = clock.stamp()
            return
        self._make_pods(job)
        mine = self.mine(job)
        wanted = sum(each.get("replicas", 1) for each in self.replicas(job).values())
        running = [pod for pod in mine if pods.phase(pod) == "Running" and not is_deleted(pod)]
        if len(running) == wanted:
            set_state(status, "Running", "JobRunning", f"{self.kind.kind} {name} is running.")
            status.setdefault("startTime", clock.stamp())

    def _has_succeeded(self, job: Object, mine: list[Object]) -> bool:
        leading = {kind for kind in self.replicas(job) if self.leads(job, kind)}
        wanted = sum(self.replicas(job)[kind].get("replicas", 1) for kind in leading)
        done = [pod for pod in mine if self._type_of(job, pod) in leading]
        return wanted > 0 and sum(pods.phase(pod) == "Succeeded" for pod in done) == wanted

    def _make_pods(self, job: Object) -> None:
        metadata = job["metadata"]
        for kind, each in self.replicas(job).items():
            for index in range(each.get("replicas", 1)):
                name = f"{metadata['name']}-{kind.lower()}-{index}"
                if self.store.look(kinds.PODS, metadata["namespace"], name) is not None:
                    continue
                pod = pods.make(self.kind, job, each["template"], name)
                pod["spec"]["restartPolicy"] = each.get("restartPolicy") or "Never"
                pods.label(pod, **{self.type_label: kind.lower(), self.index_label: str(index)})
                self.dress(job, kind, index, pod)
                if pods.create(self.operations, self.kind, job, pod):
                    self.again((metadata["namespace"], metadata["name"]), max(0.2, self.scaled(1)))

    def _clean_up(self, job: Object, status: Object) -> None:
        policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy")
        for pod in self.mine(job):
            pending = pods.phase(pod) == "Pending"
            running = policy == "Running" and pods.phase(pod) == "Running"
            if (pending or running or policy == "All") and not is_deleted(pod):
                pods.remove(self.operations, pod)
        self.on_end(job)
        self._tell(job, status)

    def _tell(self, job: Object, status: Object) -> None:
        mine = self.mine(job)
        found = {}
        for kind in self.replicas(job):
            them = [pod for pod in mine if self._type_of(job, pod) == kind]
            counted = {
                "active": sum(pods.phase(pod) == "Running" for pod in them),
                "succeeded": sum(pods.phase(pod) == "Succeeded" for pod in them),
                "failed": sum(pods.phase(pod) == "Failed" for pod in them),
            }
            found[kind] = {name: number for name, number in counted.items() if number}
        status["replicaStatuses"] = found
        if status != (job.get("status") or {}):
            status["lastReconcileTime"] = clock.stamp()
        self.operations.set_status(self.kind, job, **status)

    def _type_of(self, job: Object, pod: Object) -> str:
        label = (pod["metadata"].get("labels") or {}).get(self.type_label)
        return next((kind for kind in self.replicas(job) if kind.lower() == label), "")


def set_state(status: Object, kind: str, reason: str, message: str, *, true: bool = True) -> None:
    """Append a condition. The last condition that is True is the state of the job.

    Running and Restarting replace each other.
    """
    conditions = status.setdefault("conditions", [])
    last = conditions[-1] if conditions else None
    if last and (last["type"], last["reason"]) == (kind, reason):
        return
    other = {"Running": "Restarting", "Restarting": "Running"}.get(kind, "")
    kept = [each for each in conditions if each["type"] not in (kind, other)]
    if kind in _TERMINAL or kind == "Suspended":
        for each in kept:
            if each["type"] in ("Running", "Restarting"):
                each["status"] = "False"
    now = clock.stamp()
    kept.append(
        {
            "type": kind,
            "status": str(true),
            "reason": reason,
            "message": message,
            "lastTransitionTime": now,
            "lastUpdateTime": now,
        }
    )
    status["conditions"] = kept
