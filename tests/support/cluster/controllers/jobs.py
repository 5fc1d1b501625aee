"""The controller of batch/v1 Jobs, mainly Indexed Jobs."""

from __future__ import annotations

from cluster import kinds
from cluster.controllers import pods
from cluster.controllers.job_backoff import Backoffs
from cluster.controllers.job_look import TRACKING, Look
from cluster.controllers.loop import Controller, Settings
from cluster.operations import Operations


class Jobs(Controller):
    """Create pods until the requested number has succeeded."""

    kind = kinds.JOBS
    owned = (kinds.PODS,)

    def __init__(self, operations: Operations, settings: Settings) -> None:
        super().__init__(operations, settings)
        self.backoffs = Backoffs()

    def sync(self, namespace: str, name: str) -> None:
        job = self.store.get(kinds.JOBS, namespace, name)
        if job is None or job["spec"].get("managedBy", "kubernetes.io/job-controller") != (
            "kubernetes.io/job-controller"
        ):
            self._release_orphans(namespace)
            return
        Look(self, self.backoffs, job).run()

    def _release_orphans(self, namespace: str) -> None:
        """Remove the tracking finalizer from pods without a Job, so that they can be deleted."""
        for pod in list(self.store.all(kinds.PODS, namespace)):
            if TRACKING not in (pod["metadata"].get("finalizers") or []):
                continue
            owners = pod["metadata"].get("ownerReferences") or []
            names = [each["name"] for each in owners if each.get("controller")]
            found = self.store.look(kinds.JOBS, namespace, names[0]) if names else None
            if found is None or found["metadata"]["uid"] != owners[0]["uid"]:
                pods.release(self.operations, pod, TRACKING)
