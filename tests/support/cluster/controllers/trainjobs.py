"""TrainJobs: the controller creates a JobSet from a runtime and copies its result."""

from __future__ import annotations

from cluster import kinds
from cluster.controllers.loop import Controller, condition, is_deleted, owner_reference
from cluster.kinds import Kind
from cluster.patches import strategic
from cluster.refusals import Object, Refused
from cluster.store import fresh
from cluster.subresources import set_condition

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_MAIN = "node"
_PORT = "29500"
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class TrainJobs(Controller):
    """The controller of TrainJobs. The runtime sets the failure policy."""

    kind = kinds.TRAINJOBS
    owned = (kinds.JOBSETS,)

    def sync(self, namespace: str, name: str) -> None:
        job = self.store.get(kinds.TRAINJOBS, namespace, name)
        if job is None or is_deleted(job):
            return
        if condition(job, "Complete") or condition(job, "Failed"):
            return
        runtime = self._runtime(job)
        status = fresh(job.get("status") or {})
        if runtime is None or kinds.JOBSETS not in self.store.kinds:
            fields = {"type": "Failed", "status": "True", "reason": "TrainingRuntimeNotSupported"}
            fields["message"] = f"referenced runtime not found: {job['spec'].get('runtimeRef')}"
            set_condition({"status": status}, fields)
            self.operations.set_status(kinds.TRAINJOBS, job, **status)
            return
        self._bring(job, runtime)
        self._tell(job, status)

    def _runtime(self, job: Object) -> Object | None:
        reference = job["spec"]["runtimeRef"]
        kind: Kind = kinds.CLUSTERRUNTIMES
        namespace = ""
        if reference.get("kind") == kinds.RUNTIMES.kind:
            kind, namespace = kinds.RUNTIMES, job["metadata"]["namespace"]
        return self.store.get(kind, namespace, reference["name"])

    def _bring(self, job: Object, runtime: Object) -> None:
        metadata = job["metadata"]
        spec = _render(job, runtime)
        there = self.store.look(kinds.JOBSETS, metadata["namespace"], metadata["name"])
        if there is None:
            made = {
                "metadata": {
                    "name": metadata["name"],
                    "labels": {**(metadata.get("labels") or {})},
                    "ownerReferences": [owner_reference(kinds.TRAINJOBS, job)],
                },
                "spec": spec,
            }
            self.operations.create(kinds.JOBSETS, metadata["namespace"], made)
            return

        def how(thing: Object) -> Object:
            thing["spec"] = spec
            return thing

        try:
            self.operations.change(kinds.JOBSETS, metadata["namespace"], metadata["name"], how)
        except Refused as refused:
            event = ("Warning", "JobSetUpdateFailed", refused.message)
            self.operations.event(kinds.TRAINJOBS, job, *event)

    def _tell(self, job: Object, status: Object) -> None:
        metadata = job["metadata"]
        jobset = self.store.look(kinds.JOBSETS, metadata["namespace"], metadata["name"])
        if jobset is None:
            return
        holder = {"status": status}
        suspended = bool(job["spec"].get("suspend"))
        if suspended or condition({"status": status}, "Suspended"):
            reason = "Suspended" if suspended else "Resumed"
            fields = {"type": "Suspended", "status": str(suspended), "reason": reason}
            set_condition(holder, {**fields, "message": f"TrainJob is {reason.lower()}"})
        for theirs, ours in (("Completed", "Complete"), ("Failed", "Failed")):
            if found := condition(jobset, theirs):
                fields = {"reason": found["reason"], "message": found["message"]}
                set_condition(holder, {"type": ours, "status": "True", **fields})
        status["jobsStatus"] = (jobset.get("status") or {}).get("replicatedJobsStatus") or []
        self.operations.set_status(kinds.TRAINJOBS, job, **status)


def _render(job: Object, runtime: Object) -> Object:
    spec = fresh(runtime["spec"]["template"]["spec"])
    trainer = job["spec"].get("trainer") or {}
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    for each in spec["replicatedJobs"]:
        labels = (each["template"].get("metadata") or {}).get("labels") or {}
        if labels.get(_STEP) == "trainer" or each["name"] == _MAIN:
            _train(job, each, trainer, nodes)
    spec["suspend"] = bool(job["spec"].get("suspend"))
    return spec


def _train(job: Object, each: Object, trainer: Object, nodes: int) -> None:
    name = job["metadata"]["name"]
    spec = each["template"]["spec"]
    spec.update(completionMode="Indexed", completions=nodes, parallelism=nodes)
    for container in spec["template"]["spec"]["containers"]:
        if container["name"] != _MAIN:
            continue
        for field in ("image", "command", "args"):
            if field in trainer:
                container[field] = trainer[field]
        if "resourcesPerNode" in trainer:
            container["resources"] = trainer["resourcesPerNode"]
        own = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
            "PET_MASTER_ADDR": f"{name}-{each['name']}-0-0.{name}",
            "PET_MASTER_PORT": _PORT,
        }
        rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}
        listed = [{"name": key, "value": value} for key, value in own.items()]
        patch = {"env": [*(trainer.get("env") or []), *listed, rank]}
        container.update(strategic(container, patch))
