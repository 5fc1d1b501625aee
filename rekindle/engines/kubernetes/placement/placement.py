"""Create, reschedule and remove a job's objects in the cluster."""

from __future__ import annotations

import base64
import contextlib
import time
from typing import Any

import msgspec

from rekindle import names
from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ConflictError, MissingObjectError
from rekindle.engines.kubernetes.client.objects import (
    GONE_S,
    collection,
    ensure,
    find,
    path_of,
    wait_gone,
    wait_until,
)
from rekindle.engines.kubernetes.client.pod_status import pod_status
from rekindle.engines.kubernetes.labels import ATTEMPT, Names, selector
from rekindle.engines.kubernetes.manifests.ascend import is_mindclusters
from rekindle.engines.kubernetes.manifests.coordinator import owned
from rekindle.engines.kubernetes.manifests.kinds.base import WorkloadPhase, conditions
from rekindle.engines.kubernetes.manifests.kinds.batch import NODES
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter, render
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, WorkloadKind
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.errors import JobError, UsageError
from rekindle.job.spec import JobDirectory, JobSpec, replace_file

ENDED_GRACE_S = 5  # for pods of an attempt that is over
OVERDUE_S = 10.0  # after its grace; then the host of a pod that should have ended counts as dead
_NO_POD = "ReplicaFailure"  # the condition of a Deployment that cannot create its pod
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


class Placement:
    """The objects of one job. The creating process may end at any moment; the next finds the names.

    directory: the job's directory on this machine, with its description and its secret.
    """

    def __init__(
        self, directory: JobDirectory, pods: KubernetesSettings, api: Api, hosts: Hosts
    ) -> None:
        self._directory = directory
        self._pods = pods
        self._api = api
        self._hosts = hosts
        spec = directory.spec()
        self._job_id = spec.job_id
        self._failover_grace_s = spec.failover_grace_s
        self._secret = ""
        self._kept_off: tuple[int, frozenset[str]] = (-1, frozenset())  # attempt, avoided hosts
        self.kind = adapter(pods.kind)
        self.names = Names.of(self._job_id)

    @property
    def overdue_s(self) -> float:
        """Return the wait for a pod after its grace; then it is removed by force."""
        return self._failover_grace_s or OVERDUE_S

    # ---- creation

    def around(self, attempt: int, isolated: frozenset[str] = frozenset()) -> Manifests:
        """Create or update all objects except the workload; return all manifests.

        isolated: hosts that this attempt has isolated. They count even if a person has released one
        since, because the attempt refuses agents from there.

        Raises UsageError: the job is in another cluster.
        """
        self._must_be_here()
        wanted = self._render(attempt, isolated)
        root = ensure(self._api, wanted.root)
        replace_file(self._directory.cluster, self._api.host.encode())
        uid = root["metadata"]["uid"]
        secret, *others = wanted.around
        self._keep_secret(ensure(self._api, owned(secret, uid)))
        # The cluster's secret counts, which may come from another process.
        wanted = self._render(attempt, isolated)
        for each in (*others, *wanted.beside):
            if is_mindclusters(each):
                ensure(self._api, owned(each, uid))
            else:
                self._api.apply(path_of(each), owned(each, uid))
        workload = owned(wanted.workload, uid)
        return msgspec.structs.replace(wanted, root=root, workload=workload)

    def place(self, wanted: Manifests) -> None:
        """Run the workload as wanted: create it, or reschedule the present one.

        Raises JobError: the cluster has a later attempt.
        """
        path = self.workload_path
        found = find(self._api, path)
        if found is None:
            ensure(self._api, wanted.workload)
            return
        theirs, ours = _attempt_of(found), _attempt_of(wanted.workload)
        if theirs > ours:
            raise JobError(
                f"the cluster has attempt {theirs} of job {self._job_id} already; Rekindle "
                f"cannot place the older attempt {ours}"
            )
        phase = self.kind.status(found).phase
        over = phase in (WorkloadPhase.SUCCEEDED, WorkloadPhase.FAILED)
        if theirs == ours and not over and phase is not WorkloadPhase.SUSPENDED:
            return  # the process that placed it ended then, or is another one
        suspend = self.kind.suspend_patch()
        resume = self.kind.resume_patch(wanted.workload, self._hosts.isolated())
        if suspend is None or resume is None or over:
            self._delete(path, found)
            ensure(self._api, wanted.workload)
            return
        self._api.patch(path, suspend)
        self._end_pods(self.workers)
        what = f"the suspension of the workload of job {self._job_id}"
        wait_until(lambda: self._is_suspended(path), what, GONE_S)
        labels = {"metadata": {"labels": wanted.workload["metadata"]["labels"]}}
        self._api.patch(path, resume | labels)

    def place_missing(self, attempt: int, isolated: frozenset[str]) -> None:
        """Recreate the workload if it was removed, or if its controller has given it up.

        isolated: as in around().
        """
        found = find(self._api, self.workload_path)
        if found is not None and self.kind.status(found).phase is WorkloadPhase.FAILED:
            self._delete(self.workload_path, found)
            found = None
        if found is None:
            ensure(self._api, self.around(attempt, isolated).workload)

    def keep_off(self, attempt: int, isolated: frozenset[str]) -> None:
        """Make later pods avoid isolated hosts, if the kind can; once per attempt and set of hosts.

        isolated: as in around().
        """
        if not self.kind.follows or self._kept_off == (attempt, isolated):
            return
        wanted = self._render(attempt, isolated).workload
        self._api.patch(self.workload_path, self.kind.avoid_patch(wanted))
        self._kept_off = (attempt, isolated)

    def remove(self) -> None:
        """Remove all objects of the job, and wait until they are gone.

        Raises UsageError: the job is in another cluster.
        """
        self._must_be_here()
        found = find(self._api, self.workload_path)
        if found is not None:
            self._delete(self.workload_path, found)
        with contextlib.suppress(MissingObjectError):
            self._api.delete(self.path("v1", "configmaps", self.names.root))
        self._end_pods(selector(self._job_id))
        self._wait_collected()
        self._directory.cluster.unlink(missing_ok=True)

    def end_pod(self, pod: Object, grace_s: int) -> None:
        """End this pod, and not a later one of the same name."""
        path = self.path("v1", "pods", pod["metadata"]["name"])
        with contextlib.suppress(MissingObjectError, ConflictError):
            self._api.delete(path, uid=pod["metadata"]["uid"], grace_s=grace_s)

    def _must_be_here(self) -> None:
        """Check that the job is in this cluster: settings may name another one since its placement.

        Raises UsageError: the job is in another cluster.
        """
        noted = self._directory.cluster
        before = noted.read_text() if noted.exists() else ""
        if before in ("", self._api.host):
            return
        if find(self._api, self.path("v1", "configmaps", self.names.root)) is None:
            raise UsageError(
                f"job {self._job_id} is in the cluster at {before}, but the settings name "
                f"{self._api.host}, which does not have it; select that cluster again "
                f"(KUBECONFIG, the current context), or remove {noted} if that cluster does not "
                "exist any longer"
            )

    def _render(self, attempt: int, isolated: frozenset[str]) -> Manifests:
        return render(
            self._directory.spec(),
            self._pods,
            secret=self.secret(),
            attempt=attempt,
            avoid=tuple(sorted(isolated.union(self._hosts.isolated()))),
        )

    def _is_suspended(self, path: str) -> bool:
        """Return whether the workload may change: it is suspended and has no active pods."""
        found = self._api.get(path)
        active = (found.get("status") or {}).get("active")
        return self.kind.status(found).phase is WorkloadPhase.SUSPENDED and not active

    # ---- end

    def _delete(self, path: str, found: Object) -> None:
        with contextlib.suppress(MissingObjectError):
            self._api.delete(path, uid=found["metadata"]["uid"])
        self._end_pods(self.workers)
        wait_gone(self._api, path, what=f"the workload of job {self._job_id}")

    def _end_pods(self, labels: str) -> None:
        """End these pods of a past attempt without waiting for their work.

        This method removes a pod by force if its host does not answer. Otherwise it would stay
        forever.
        """
        asked: dict[str, float] = {}

        def gone() -> bool:
            now, unasked = time.monotonic(), False
            pods = self.our_pods(labels, fieldSelector=_NOT_OVER)
            for pod in pods:
                uid = pod["metadata"]["uid"]
                given = pod["metadata"].get("deletionGracePeriodSeconds")
                unasked |= given is None or given > ENDED_GRACE_S
                if now - asked.setdefault(uid, now) > ENDED_GRACE_S + self.overdue_s:
                    self.end_pod(pod, 0)
            if unasked:
                self._api.delete(self._pods_path, labelSelector=labels, grace_s=ENDED_GRACE_S)
            return not pods

        wait_until(gone, f"the removal of the pods of job {self._job_id}", GONE_S)

    def _wait_collected(self) -> None:
        """Wait until the objects that the job's root owns are gone."""
        for pod in self.our_pods():
            if not pod["metadata"].get("ownerReferences"):  # its workload was removed without it
                self.end_pod(pod, ENDED_GRACE_S)
        wait_until(
            lambda: not self.our_pods(), f"the removal of the pods of job {self._job_id}", GONE_S
        )
        for version, plural, name in (
            ("v1", "secrets", self.names.secret),
            ("v1", "services", self.names.coordinator),
            ("v1", "services", self.names.nodes),
        ):
            wait_gone(self._api, self.path(version, plural, name), what=f"{plural}/{name}")

    # ---- queries

    def secret(self) -> str:
        """Return the job's secret: the cluster's, or this machine's if the cluster has none."""
        if not self._secret:
            found = find(self._api, self.path("v1", "secrets", self.names.secret))
            if found is None:
                return self._directory.secret()
            self._keep_secret(found)
        return self._secret

    def described(self) -> JobSpec | None:
        """Return the description that the cluster has; None: the cluster has no such job.

        Raises UsageError: another version of Rekindle wrote it.
        """
        found = find(self._api, self.path("v1", "secrets", self.names.secret))
        if found is None:
            return None
        try:
            return msgspec.json.decode(
                base64.b64decode(found["data"][names.SPEC_FILE]), type=JobSpec
            )
        except msgspec.DecodeError as error:
            raise UsageError(
                f"this version of Rekindle cannot read the description of job {self._job_id} in "
                f"the cluster, which another version wrote ({error}); end the job with that "
                "version, or give another job_id"
            ) from error

    def _keep_secret(self, found: Object) -> None:
        self._secret = base64.b64decode(found["data"][names.SECRET_FILE]).decode().strip()
        replace_file(self._directory.path / names.SECRET_FILE, self._secret.encode())

    def attempt(self) -> int:
        """Return the placed attempt; -1: none."""
        found = find(self._api, self.workload_path)
        return -1 if found is None else _attempt_of(found)

    def has_coordinator(self) -> bool:
        """Return whether the coordinator's Deployment exists; the coordinator may not answer."""
        return self._coordinator() is not None

    def _coordinator(self) -> Object | None:
        return find(self._api, self.path("apps/v1", "deployments", self.names.coordinator))

    def our_pods(self, labels: str = "", **query: str) -> list[dict[str, Any]]:
        """Return the job's pods, or those with these labels."""
        chosen = labels or selector(self._job_id)
        return list(self._api.get(self._pods_path, labelSelector=chosen, **query)["items"] or ())

    def coordinator_words(self) -> list[str]:
        """Return sentences about pods that wait, and about a refused coordinator's pod."""
        words = [status.in_words() for status in map(pod_status, self.our_pods()) if status.reasons]
        failed = [one for one in conditions(self._coordinator() or {}) if one["type"] == _NO_POD]
        return words + [one["message"] for one in failed]

    @property
    def workers(self) -> str:
        """Return the label selector of the pods of nodes and spares."""
        return f"{self.kind.pods_label}={self.names.workload},{selector(self._job_id)}"

    @property
    def workload_path(self) -> str:
        """Return the path of the workload."""
        gvk = self.kind.gvk
        return self.path(gvk.api_version, gvk.plural, self.names.workload)

    @property
    def pods_maker(self) -> str:
        """Return the name of the object whose controller creates the pods of nodes and spares."""
        inside = self._pods.kind in (WorkloadKind.JOBSET, WorkloadKind.TRAINJOB)
        return f"{self.names.workload}-{NODES}-0" if inside else self.names.workload

    @property
    def _pods_path(self) -> str:
        return self.path("v1", "pods")

    def path(self, version: str, plural: str, *rest: str) -> str:
        """Return the path of an object or a collection in the job's namespace."""
        return "/".join((collection(version, plural, self._pods.namespace), *rest))


def _attempt_of(workload: Object) -> int:
    """Return the attempt of a workload; -1: its label is absent."""
    return int((workload["metadata"].get("labels") or {}).get(ATTEMPT, -1))
