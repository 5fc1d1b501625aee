"""One reconciliation of a Job: count ended pods, create missing pods, and write the status."""

from __future__ import annotations

from cluster import clock, kinds
from cluster.controllers import indexes, pods
from cluster.controllers.job_backoff import Backoffs
from cluster.controllers.loop import Controller, Key, condition, is_deleted
from cluster.deleting import DeleteOptions, delete
from cluster.operations import suffix
from cluster.refusals import Object
from cluster.store import fresh
from cluster.subresources import set_condition

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
_TERMINAL = ("Complete", "Failed")


class Look:
    """One reconciliation of one Job."""

    def __init__(self, controller: Controller, backoffs: Backoffs, job: Object) -> None:
        self.controller = controller
        self.backoffs = backoffs
        self.operations = controller.operations
        self.job = job
        self.spec: Object = job["spec"]
        self.status: Object = fresh(job.get("status") or {})
        metadata = job["metadata"]
        self.key: Key = (metadata["namespace"], metadata["name"])
        self.pods = pods.owned(controller.store, metadata["uid"], metadata["namespace"])
        self.is_indexed = self.spec.get("completionMode") == "Indexed"
        self.completed = indexes.parse(self.status.get("completedIndexes"))
        self.failure: tuple[str, str] | None = None

    def run(self) -> None:
        if self._is_over():
            self._clean_up()
            return
        if is_deleted(self.job):
            for pod in self.pods:
                pods.release(self.operations, pod, TRACKING)
            return
        suspended = bool(self.spec.get("suspend"))
        self._start(suspended)
        self._count()
        self._judge()
        if self.failure or condition({"status": self.status}, "SuccessCriteriaMet") or suspended:
            self._stop_pods()
        else:
            self._drop_surplus()
            self._make_pods()
        self._tell()

    def _is_over(self) -> bool:
        return any(condition(self.job, each) for each in _TERMINAL)

    def _clean_up(self) -> None:
        for pod in self.pods:
            pods.release(self.operations, pod, TRACKING)
        self.backoffs.forget(self.job)
        ttl = self.spec.get("ttlSecondsAfterFinished")
        over = next(found for each in _TERMINAL if (found := condition(self.job, each)))
        if ttl is None or is_deleted(self.job):
            return
        left = ttl - clock.since(over["lastTransitionTime"])
        if left > 0:
            self.controller.again(self.key, left)
            return
        options = DeleteOptions(policy="Foreground", uid=self.job["metadata"]["uid"])
        delete(self.operations, kinds.JOBS, *self.key, options)

    def _start(self, suspended: bool) -> None:
        was = condition({"status": self.status}, "Suspended")
        if suspended:
            self.status.pop("startTime", None)
            if not was:
                self._set("Suspended", "True", "JobSuspended", "Job suspended")
                self._event("Normal", "Suspended", "Job suspended")
        else:
            if was:
                self._set("Suspended", "False", "JobResumed", "Job resumed")
                self._event("Normal", "Resumed", "Job resumed")
                self.backoffs.forget(self.job)
            self.status.setdefault("startTime", clock.stamp())

    def _count(self) -> None:
        """Count the pods that have ended since the last reconciliation, each pod once."""
        replaces_late = self.spec.get("podReplacementPolicy") == "Failed"
        for pod in self.pods:
            if TRACKING not in (pod["metadata"].get("finalizers") or []):
                continue
            phase = pods.phase(pod)
            if phase == "Succeeded":
                self._count_success(pod)
            elif phase == "Failed" or (is_deleted(pod) and not replaces_late):
                self._count_failure(pod)
            else:
                continue
            pods.release(self.operations, pod, TRACKING)

    def _count_success(self, pod: Object) -> None:
        index = pods.index_of(pod, INDEX)
        self.backoffs.of(self.job).failures = 0
        if not self.is_indexed:
            self.status["succeeded"] = self.status.get("succeeded", 0) + 1
        elif index < self.spec["completions"]:
            self.completed.add(index)

    def _count_failure(self, pod: Object) -> None:
        if self.is_indexed and pods.index_of(pod, INDEX) >= self.spec["completions"]:
            return
        self.backoffs.of(self.job).fail()
        self.status["failed"] = self.status.get("failed", 0) + 1

    def _judge(self) -> None:
        """Decide whether the Job has failed or succeeded."""
        if found := condition({"status": self.status}, "FailureTarget"):
            self.failure = (found["reason"], found["message"])
            return
        if condition({"status": self.status}, "SuccessCriteriaMet"):
            return
        self.failure = self._too_many()
        if self.failure:
            self._set("FailureTarget", "True", *self.failure)
            return
        if self._is_complete():
            text = "Reached expected number of succeeded pods"
            self._set("SuccessCriteriaMet", "True", "CompletionsReached", text)

    def _too_many(self) -> tuple[str, str] | None:
        limit = self.spec["backoffLimit"]
        failed = self.status.get("failed", 0)
        restarts = sum(pods.restarts(pod) for pod in self.pods if pods.is_active(pod))
        in_place = self.spec["template"]["spec"].get("restartPolicy") == "OnFailure"
        if failed > limit or (in_place and restarts and failed + restarts > limit):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _is_complete(self) -> bool:
        completions = self.spec.get("completions")
        if self.is_indexed:
            return completions is not None and len(self.completed) >= completions
        succeeded: int = self.status.get("succeeded", 0)
        if completions is None:
            return succeeded > 0 and not any(map(pods.is_active, self._now()))
        return succeeded >= completions

    def _now(self) -> list[Object]:
        metadata = self.job["metadata"]
        return pods.owned(self.controller.store, metadata["uid"], metadata["namespace"])

    def _stop_pods(self) -> None:
        for pod in self._now():
            if pods.is_active(pod):
                pods.remove(self.operations, pod, TRACKING)

    def _drop_surplus(self) -> None:
        """Remove second pods of an index, pods of dropped indexes, and surplus pods."""
        active = [pod for pod in self._now() if pods.is_active(pod)]
        active.sort(key=lambda pod: pods.index_of(pod, INDEX))
        kept: list[int] = []
        for pod in active:
            index = pods.index_of(pod, INDEX)
            gone = index >= self.spec["completions"] if self.is_indexed else False
            again = self.is_indexed and index in kept
            if gone or again or len(kept) >= self.spec["parallelism"]:
                pods.remove(self.operations, pod, TRACKING)
            else:
                kept.append(index)

    def _make_pods(self) -> None:
        now = self._now()
        active = [pod for pod in now if pods.is_active(pod)]
        taken = {pods.index_of(pod, INDEX) for pod in active}
        if self.spec.get("podReplacementPolicy") == "Failed":
            ending = [p for p in now if is_deleted(p) and pods.phase(p) in ("Running", "Pending")]
            taken |= {pods.index_of(pod, INDEX) for pod in ending}
            active += ending
        wanted = self.spec["parallelism"] - len(active)
        if self.is_indexed:
            free = set(range(self.spec["completions"])) - taken - self.completed
            missing = sorted(free)[: max(0, wanted)]
        else:
            succeeded = self.status.get("succeeded", 0)
            left = self.spec.get("completions", wanted + len(active)) - succeeded - len(active)
            missing = [-1] * max(0, min(wanted, left))
        waits = []
        for index in missing:
            left_s = self.backoffs.of(self.job).left(self.controller.settings.time_scale)
            if left_s > 0:
                waits.append(left_s)
            elif pods.create(self.operations, kinds.JOBS, self.job, self._pod(index)):
                waits.append(max(0.2, self.controller.scaled(1.0)))
        if waits:
            self.controller.again(self.key, min(waits))

    def _pod(self, index: int) -> Object:
        name = self.job["metadata"]["name"]
        middle = f"-{index}" if self.is_indexed else ""
        pod = pods.make(kinds.JOBS, self.job, self.spec["template"], f"{name}{middle}-{suffix()}")
        pod["metadata"]["finalizers"] = [TRACKING]
        if self.is_indexed:
            annotations = pod["metadata"].setdefault("annotations", {})
            annotations[INDEX] = str(index)
            pods.label(pod, **{INDEX: str(index)})
            pod["spec"].setdefault("hostname", f"{name}-{index}")
            pods.add_environment(pod, {"JOB_COMPLETION_INDEX": str(index)})
        return pod

    def _tell(self) -> None:
        now = self._now()
        counted = pods.count(now)
        self.status.update(
            active=counted["active"] or None,
            ready=counted["ready"],
            terminating=counted["terminating"],
            uncountedTerminatedPods={},
        )
        if self.is_indexed:
            # A smaller Job drops its last indexes.
            self.completed = {each for each in self.completed if each < self.spec["completions"]}
            self.status["completedIndexes"] = indexes.in_words(self.completed) or None
            self.status["succeeded"] = len(self.completed) or None
        if not any(pods.phase(pod) in ("Running", "Pending") for pod in now):
            self._finish()
        self.operations.set_status(kinds.JOBS, self.job, **self.status)

    def _finish(self) -> None:
        """Set the final condition. Call this only once all pods have ended."""
        done = condition({"status": self.status}, "SuccessCriteriaMet")
        if self.failure:
            self._set("Failed", "True", *self.failure)
            self._event("Warning", *self.failure)
        elif done:
            self._set("Complete", "True", done["reason"], done["message"])
            self.status["completionTime"] = clock.stamp()
            self._event("Normal", "Completed", "Job completed")

    def _set(self, kind: str, status: str, reason: str, message: str) -> None:
        fields = {"type": kind, "status": status, "reason": reason, "message": message}
        set_condition({"status": self.status}, fields)

    def _event(self, kind: str, reason: str, message: str) -> None:
        self.operations.event(kinds.JOBS, self.job, kind, reason, message)
