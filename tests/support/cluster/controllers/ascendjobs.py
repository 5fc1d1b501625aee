"""AscendJobs: the operator replaces a deleted pod under the same index, with the next version."""

from __future__ import annotations

from cluster import kinds
from cluster.controllers import podgroups, pods
from cluster.controllers.loop import Settings, controller_of, is_deleted
from cluster.controllers.replicas import Replicas, set_state
from cluster.operations import Operations
from cluster.refusals import Object
from cluster.store import Event

_FRAMEWORKS = {"pytorch": "Master", "mindspore": "Scheduler", "tensorflow": "Chief"}


class AscendJobs(Replicas):
    """The operator of AscendJobs."""

    kind = kinds.ASCENDJOBS
    type_label = "replica-type"
    index_label = "replica-index"

    def __init__(self, operations: Operations, settings: Settings) -> None:
        super().__init__(operations, settings)
        self._versions: dict[str, int] = {}

    def hear(self, event: Event) -> None:
        """Increase the version of a job if a pod of the current version is deleted."""
        if event.kind is kinds.PODS and event.after is None:
            owner = controller_of(event.newest)
            if owner and owner["kind"] == self.kind.kind:
                version = (event.newest["metadata"].get("labels") or {}).get("version", "0")
                if int(version) == self._version(owner["uid"]):
                    self._versions[owner["uid"]] = int(version) + 1
        super().hear(event)

    def replicas(self, job: Object) -> dict[str, Object]:
        return dict(job["spec"]["replicaSpecs"])

    def leads(self, job: Object, kind: str) -> bool:
        if job["spec"].get("successPolicy") == "AllWorkers":
            return True
        leader = _FRAMEWORKS[job["metadata"]["labels"]["framework"]]
        return kind == leader or leader not in job["spec"]["replicaSpecs"]

    def refuses(self, job: Object) -> tuple[str, str] | None:
        framework = (job["metadata"].get("labels") or {}).get("framework")
        specs = job["spec"].get("replicaSpecs") or {}
        leader = _FRAMEWORKS.get(framework or "")
        if leader is None:
            return "JobValidFailed", f"framework label is not set or is invalid: {framework}"
        for kind, each in specs.items():
            if kind not in (leader, "Worker"):
                return (
                    "JobValidFailed",
                    f"replicaType is {kind} but must be one of [{leader} Worker]",
                )
            names = [c.get("name") for c in each["template"]["spec"].get("containers") or []]
            if "ascend" not in names:
                return "JobValidFailed", f"There is no container named ascend in {kind}"
        alone = framework == "mindspore" and sum(s.get("replicas", 1) for s in specs.values()) == 1
        if specs.get(leader, {"replicas": 0}).get("replicas", 1) != 1 and not alone:
            return "JobValidFailed", f"{leader} must have exactly one replica"
        return None

    def before(self, job: Object, status: Object) -> bool:
        wanted = sum(each.get("replicas", 1) for each in self.replicas(job).values())
        policy = (job["spec"].get("runPolicy") or {}).get("schedulingPolicy") or {}
        least = policy.get("minAvailable", wanted)
        queue = policy.get("queue", "default")
        podgroups.ensure(self.operations, self.kind, job, least, queue)
        version, limit = self._version(job["metadata"]["uid"]), self._limit(job)
        if limit is not None and version > limit:
            text = f"job {job['metadata']['name']} has reached the backoff limit {limit}"
            self.fail(job, status, text)
            return False
        mine = self.mine(job)
        if (version and len(mine) < wanted) or any(map(is_deleted, mine)):
            self._restarting(job, status)
        return True

    def on_end(self, job: Object) -> None:
        podgroups.remove(self.operations, job)

    def dress(self, job: Object, kind: str, index: int, pod: Object) -> None:
        metadata = job["metadata"]
        framework = metadata["labels"]["framework"]
        leader = _FRAMEWORKS[framework]
        offset = 1 if kind == "Worker" and leader in self.replicas(job) else 0
        rank = index + offset
        version = self._version(metadata["uid"])
        labels = {"group-name": self.kind.group, "job-name": metadata["name"]}
        labels |= {"framework": framework, "version": str(version)}
        if kind == leader:
            labels["job-role"] = "master"
        pods.label(pod, **labels)
        annotations = pod["metadata"].setdefault("annotations", {})
        annotations["hccl/rankIndex"] = str(rank)
        annotations["scheduling.k8s.io/group-name"] = podgroups.name_of(job)
        if scheduler := job["spec"].get("schedulerName"):
            pod["spec"]["schedulerName"] = scheduler
        address = f"{metadata['name']}-{leader.lower()}-0"
        size = sum(each.get("replicas", 1) for each in self.replicas(job).values())
        values = {"MINDX_TASK_ID": metadata["uid"], "REPLICA_TYPE": kind}
        if framework == "mindspore":
            values |= {"MS_SCHED_HOST": address, "MS_SCHED_PORT": "2222"}
            values |= {"MS_NODE_RANK": str(rank), "MS_WORKER_NUM": str(size)}
        else:
            values |= {"MASTER_ADDR": address, "MASTER_PORT": "2222"}
            values |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        pods.add_environment(pod, values, "ascend")

    def _restarting(self, job: Object, status: Object) -> None:
        text = f"AscendJob {job['metadata']['name']} is restarting"
        set_state(status, "Restarting", "jobRestarting", text)

    def _limit(self, job: Object) -> int | None:
        """Return the backoffLimit of the job, or None (no limit) if it is missing or below 1."""
        limit = (job["spec"].get("runPolicy") or {}).get("backoffLimit")
        return limit if limit and limit > 0 else None

    def _version(self, uid: str) -> int:
        if uid not in self._versions:
            versions = [
                int((pod["metadata"].get("labels") or {}).get("version", 0))
                for pod in self.store.all(kinds.PODS)
                if any(each["uid"] == uid for each in pod["metadata"].get("ownerReferences") or [])
            ]
            self._versions[uid] = max(versions, default=0)
        return self._versions[uid]
