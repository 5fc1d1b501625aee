"""The controller of JobSets, whose Jobs start, stop and end together."""

from __future__ import annotations

from cluster import kinds
from cluster.controllers import jobset_jobs as parts
from cluster.controllers.jobset_jobs import LABELS
from cluster.controllers.loop import Controller, Key, condition, is_deleted, owner_reference
from cluster.deleting import DeleteOptions, delete
from cluster.refusals import Object
from cluster.store import fresh
from cluster.subresources import set_condition

_TERMINAL = ("Completed", "Failed")


class JobSets(Controller):
    """Create the Jobs of JobSets.

    Without failure policies, the first failed Job fails the JobSet.
    """

    kind = kinds.JOBSETS
    owned = (kinds.JOBS,)

    def sync(self, namespace: str, name: str) -> None:
        found = self.store.get(kinds.JOBSETS, namespace, name)
        if found is not None and not is_deleted(found):
            Look(self, found).run()


class Look:
    """One reconciliation of one JobSet."""

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

    def run(self) -> None:
        self.status["replicatedJobsStatus"] = parts.statuses(self.jobset, self.jobs)
        if any(condition(self.jobset, each) for each in _TERMINAL):
            self._end_jobs()
            return
        failed = sorted((job for job in self.jobs if condition(job, "Failed")), key=_failed_at)
        wanted = sum(each["replicas"] for each in self.spec["replicatedJobs"])
        if failed:
            first = f"(first failed job: {failed[0]['metadata']['name']})"
            text = f"jobset failed due to one or more job failures {first}"
            self._end("Failed", "FailedJobs", text)
        elif sum(condition(job, "Complete") is not None for job in self.jobs) >= wanted:
            self._end("Completed", "AllJobsCompleted", "jobset completed successfully")
        else:
            self._make_jobs()
            self._suspend_or_resume()
        self.operations.set_status(kinds.JOBSETS, self.jobset, **self.status)

    def _end(self, kind: str, reason: str, message: str) -> None:
        self._set(kind, "True", reason, message)
        self.status["terminalState"] = kind
        self.operations.event(kinds.JOBSETS, self.jobset, "Normal", reason, message)

    def _end_jobs(self) -> None:
        for job in self.jobs:
            over = condition(job, "Complete") or condition(job, "Failed")
            if not over and not is_deleted(job):
                options = DeleteOptions(policy="Foreground", uid=job["metadata"]["uid"])
                delete(self.operations, kinds.JOBS, self.key[0], job["metadata"]["name"], options)

    def _make_jobs(self) -> None:
        self._make_service()
        taken = {job["metadata"]["name"] for job in self.jobs}
        for wanted in parts.render(self.jobset):
            if wanted["metadata"]["name"] not in taken:
                self.operations.create(kinds.JOBS, self.key[0], wanted)

    def _make_service(self) -> None:
        """Create the headless service that resolves the names of the pods."""
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
        for job in self.jobs:
            if bool(job["spec"].get("suspend")) == suspended:
                continue
            if not suspended and (job.get("status") or {}).get("active"):
                continue  # a later reconciliation resumes it, once its pods are gone

            def how(thing: Object) -> None:
                thing["spec"]["suspend"] = suspended

            self.operations.edit(kinds.JOBS, job, how)
        if suspended and not was:
            self._set("Suspended", "True", "SuspendedJobs", "jobset is suspended")
        elif was and not suspended:
            self._set("Suspended", "False", "ResumeJobs", "jobset is resumed")

    def _set(self, kind: str, status: str, reason: str, message: str) -> None:
        fields = {"type": kind, "status": status, "reason": reason, "message": message}
        set_condition({"status": self.status}, fields)


def _failed_at(job: Object) -> str:
    return str((condition(job, "Failed") or {}).get("lastTransitionTime", ""))
