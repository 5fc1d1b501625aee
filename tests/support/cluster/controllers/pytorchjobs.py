"""The controller of PyTorchJobs, in the first version of the Kubeflow operator."""

from __future__ import annotations

from cluster import kinds
from cluster.controllers import pods
from cluster.controllers.loop import is_deleted
from cluster.controllers.replicas import Replicas, set_state
from cluster.refusals import Object

_LABELS = "training.kubeflow.org/"


class PyTorchJobs(Replicas):
    """The operator of PyTorchJobs. The kubelet restarts the containers."""

    kind = kinds.PYTORCHJOBS
    type_label = _LABELS + "replica-type"
    index_label = _LABELS + "replica-index"

    def replicas(self, job: Object) -> dict[str, Object]:
        return dict(job["spec"]["pytorchReplicaSpecs"])

    def leads(self, job: Object, kind: str) -> bool:
        return kind == "Master" or "Master" not in self.replicas(job)

    def refuses(self, job: Object) -> tuple[str, str] | None:
        for kind, each in self.replicas(job).items():
            names = [c.get("name") for c in each["template"]["spec"].get("containers") or []]
            if "pytorch" not in names:
                return "PyTorchJobFailedValidation", f"no container named pytorch in {kind}"
        return None

    def before(self, job: Object, status: Object) -> bool:
        policy = job["spec"].get("runPolicy") or {}
        name = job["metadata"]["name"]
        if policy.get("suspend"):
            for pod in self.mine(job):
                if not is_deleted(pod):
                    pods.remove(self.operations, pod)
            set_state(
                status, "Suspended", "PyTorchJobSuspended", f"PyTorchJob {name} is suspended."
            )
            status.pop("startTime", None)
            return False
        for each in status.get("conditions") or []:
            if each["type"] == "Suspended" and each["status"] == "True":
                each.update(status="False", reason="PyTorchJobResumed")
        limit = policy.get("backoffLimit")
        restarts = sum(map(pods.restarts, self.mine(job)))
        if limit is not None and restarts and restarts >= limit:
            text = f"Job {name} has failed because it has reached the specified backoff limit"
            self.fail(job, status, text, "BackoffLimitExceeded")
            return False
        return True

    def dress(self, job: Object, kind: str, index: int, pod: Object) -> None:
        name = job["metadata"]["name"]
        labels = {"job-name": name, "operator-name": "pytorchjob-controller"}
        if self.leads(job, kind):
            labels["job-role"] = "master"
        pods.label(pod, **{_LABELS + key: value for key, value in labels.items()})
        leader = "master" if "Master" in self.replicas(job) else "worker"
        rank = index + (1 if kind == "Worker" and leader == "master" else 0)
        size = sum(each.get("replicas", 1) for each in self.replicas(job).values())
        values = {"MASTER_ADDR": f"{name}-{leader}-0", "MASTER_PORT": "23456"}
        values |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        pods.add_environment(pod, values, "pytorch")
