"""JobSets: Jobs that start, restart and end together."""

from __future__ import annotations

from cluster import clock, kinds
from cluster.controllers import jobset_jobs as parts
from cluster.controllers import jobset_policy as policy
from cluster.controllers.jobset_jobs import LABELS
from cluster.controllers.loop import Controller, Key, condition, is_deleted, owner_reference
from cluster.deleting import DeleteOptions, delete
from cluster.refusals import Object
from cluster.store import fresh
from cluster.subresources import set_condition

_TERMINAL = ("Completed", "Failed")


class JobSets(Controller):
    """Makes their Jobs, and makes them anew by their failure policy."""

    kind = kinds.JOBSETS
    owned = (kinds.JOBS,)

    def sync(self, namespace: str, name: str) -> None:
        found = self.store.get(kinds.JOBSETS, namespace, name)
        if found is not None and not is_deleted(found):
            Look(self, found).run()


class Look:
    """One look at one JobSet."""

    def __init__(self, controller: JobSets, jobset: Object) -> None:
        self.controller = controller
        self.operations = controller.operations
        self.jobset = jobset
        self.spec: Object = jobset["spec"]
        self.status: Object = fresh(jobset.get("status") or {})
        self.status.setdefault("restarts", 0)
        metadata = jobset["metadata"]
        self.key: Key = (metadata["namespace"], metadata["name"])
        self.jobs = [
            job
            for job in controller.store.all(kinds.JOBS, metadata["namespace"])
            if any(
                each["uid"] == metadata["uid"]
                for each in job["metadata"].get("ownerReferences") or []
            )
        ]
        self.current = [job for job in self.jobs if self._is_current(job)]

    def run(self) -> None:
        for job in self.jobs:
            if job not in self.current and not is_deleted(job):
                self._delete(job, "Foreground")
        self.status["replicatedJobsStatus"] = parts.statuses(
            self.jobset, self.current, self.status.get("replicatedJobsStatus") or []
        )
        if any(condition(self.jobset, each) for each in _TERMINAL):
            self._clean_up()
            return
        failed = [job for job in self.current if condition(job, "Failed")]
        failed.sort(key=_failed_at)
        if failed:
            self._fail(failed[0])
        elif policy.has_succeeded(self.jobset, self.current):
            self._end("Completed", "AllJobsCompleted", "jobset completed successfully")
        else:
            self._make_jobs()
            self._suspend_or_resume()
        self.operations.set_status(kinds.JOBSETS, self.jobset, **self.status)

    def _is_current(self, job: Object) -> bool:
        labels = job["metadata"]["labels"]
        if int(labels[LABELS + "restart-attempt"]) != self.status["restarts"]:
            return False
        name, index = labels[LABELS + "replicatedjob-name"], int(labels[LABELS + "job-index"])
        wanted = policy.job_restarts(self.status, name, index)
        if int(labels.get(LABELS + "job-restart-attempt", 0)) != wanted:
            return False
        return any(
            each["name"] == name and index < each["replicas"]
            for each in self.spec["replicatedJobs"]
        )

    def _fail(self, job: Object) -> None:
        found = condition(job, "Failed")
        assert found is not None
        action = policy.judge(self.jobset, job, found)
        first = f"(first failed job: {job['metadata']['name']})"
        if action == "":
            told = f"jobset failed due to one or more job failures {first}"
            self._end("Failed", "FailedJobs", told)
        elif action == "FailJobSet":
            told = f"jobset failed due to FailJobSet failure policy action {first}"
            self._end("Failed", "FailJobSetFailurePolicyAction", told)
        elif not policy.count(self.jobset, self.status, job, action):
            told = f"jobset failed due to reaching max number of restarts {first}"
            self._end("Failed", "ReachedMaxRestarts", told)
        else:
            told = f"restarting due to failure {first}"
            self.operations.event(kinds.JOBSETS, self.jobset, "Warning", "Restarting", told)

    def _end(self, kind: str, reason: str, message: str) -> None:
        self._set(kind, "True", reason, message)
        self.status["terminalState"] = kind
        self.operations.event(kinds.JOBSETS, self.jobset, "Normal", reason, message)

    def _clean_up(self) -> None:
        for job in self.current:
            over = condition(job, "Complete") or condition(job, "Failed")
            if not over and not is_deleted(job):
                self._delete(job, "Foreground")
        ttl = self.spec.get("ttlSecondsAfterFinished")
        over = next(found for each in _TERMINAL if (found := condition(self.jobset, each)))
        if ttl is None:
            return
        left = ttl - clock.since(over["lastTransitionTime"])
        if left > 0:
            self.controller.again(self.key, left)
            return
        options = DeleteOptions(policy="Foreground", uid=self.jobset["metadata"]["uid"])
        delete(self.operations, kinds.JOBSETS, *self.key, options)

    def _make_jobs(self) -> None:
        self._make_service()
        old = [job for job in self.jobs if job not in self.current]
        strategy = (self.spec.get("failurePolicy") or {}).get("restartStrategy")
        if old and strategy == "BlockingRecreate":
            return
        taken = {job["metadata"]["name"] for job in self.jobs}
        for wanted in parts.render(self.jobset, self.status):
            if wanted["metadata"]["name"] not in taken:
                self.operations.create(kinds.JOBS, self.key[0], wanted)

    def _make_service(self) -> None:
        """Headless, for the names of the pods."""
        name = self.spec["network"].get("subdomain") or self.key[1]
        if self.controller.store.look(kinds.SERVICES, self.key[0], name) is not None:
            return
        owner = owner_reference(kinds.JOBSETS, self.jobset)
        self.operations.create(
            kinds.SERVICES,
            self.key[0],
            {
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": {
                    "clusterIP": "None",
                    "selector": {LABELS + "jobset-name": self.key[1]},
                    "publishNotReadyAddresses": self.spec["network"]["publishNotReadyAddresses"],
                },
            },
        )

    def _suspend_or_resume(self) -> None:
        suspended = bool(self.spec["suspend"])
        was = condition({"status": self.status}, "Suspended")
        for job in self.current:
            if bool(job["spec"].get("suspend")) == suspended:
                continue

            def how(thing: Object, job: Object = job) -> None:
                if not suspended:
                    parts.take_directives(self.jobset, thing)
                thing["spec"]["suspend"] = suspended

            if not suspended and (job.get("status") or {}).get("active"):
                continue  # it changes again once its pods are gone
            self.operations.edit(kinds.JOBS, job, how)
        if suspended and not was:
            self._set("Suspended", "True", "SuspendedJobs", "jobset is suspended")
        elif was and not suspended:
            self._set("Suspended", "False", "ResumeJobs", "jobset is resumed")

    def _delete(self, job: Object, how: str) -> None:
        options = DeleteOptions(policy=how, uid=job["metadata"]["uid"])
        delete(self.operations, kinds.JOBS, self.key[0], job["metadata"]["name"], options)

    def _set(self, kind: str, status: str, reason: str, message: str) -> None:
        told = {"type": kind, "status": status, "reason": reason, "message": message}
        set_condition({"status": self.status}, told)


def _failed_at(job: Object) -> str:
    return str((condition(job, "Failed") or {}).get("lastTransitionTime", ""))
