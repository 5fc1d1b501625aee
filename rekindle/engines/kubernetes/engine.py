"""The Kubernetes engine: a job's coordinator and nodes as pods of a cluster.

Whoever launches may die at any moment, and the next one finds the same names. The coordinator's
journal is fetched from it and kept in the job's directory; it goes on there when the pods are gone.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from rekindle import names
from rekindle.engines.client import JobClient, straight
from rekindle.engines.kubernetes.api import Api, Object, load
from rekindle.engines.kubernetes.coordinator import owned
from rekindle.engines.kubernetes.errors import ApiError, ConflictError, MissingObjectError
from rekindle.engines.kubernetes.hosts import Hosts
from rekindle.engines.kubernetes.kinds.base import Phase
from rekindle.engines.kubernetes.labels import ATTEMPT, Names, selector
from rekindle.engines.kubernetes.manifests import Manifests, adapter, render
from rekindle.engines.kubernetes.objects import (
    GONE_S,
    collection,
    ensure,
    find,
    path_of,
    wait_gone,
    wait_until,
)
from rekindle.engines.kubernetes.pods import Pods
from rekindle.engines.kubernetes.seen import look_at
from rekindle.engines.kubernetes.watching import Watching
from rekindle.engines.mirror import Mirror
from rekindle.errors import JobError, LeaseHeldError
from rekindle.recovery.classification import Sign
from rekindle.recovery.hosts import learned_from
from rekindle.recovery.journal import AnyEvent, NodeJoined
from rekindle.runtime.ledger import under_way
from rekindle.runtime.spec import Endpoint, JobDirectory, home, replace_file

ENDED_GRACE_S = 5  # for pods of an attempt that is over
OVERDUE_S = 10.0  # after which a host is taken for dead
READY_S = 300.0  # for a coordinator's pod: its image may have to be pulled
SILENT_S = 20.0  # of a coordinator whose journal is known but for the newest events


def engine_for(directory: JobDirectory) -> KubernetesEngine:
    """Return the engine of a job that is described in this directory.

    Raises UsageError: there is no cluster.
    """
    pods = msgspec.json.decode(directory.pods.read_bytes(), type=Pods)
    return KubernetesEngine(directory, pods, _api())


@functools.cache
def _api() -> Api:
    """The cluster that the usual settings name: one set of connections in a process."""
    return load()


class KubernetesEngine:
    """Places a job in a cluster.

    directory: the job's on this machine: its description, its secret, the copy of its journal.
    """

    def __init__(self, directory: JobDirectory, pods: Pods, api: Api) -> None:
        self._directory = directory
        self._pods = pods
        self._api = api
        self._kind = adapter(pods.kind)
        self._job_id = directory.spec().job_id
        self._names = Names.of(self._job_id)
        self._mirror = Mirror(directory.ledger)
        self._hosts = Hosts(api, pods, home())
        self._watching = Watching(api, pods, directory, self._job_id)
        self._addresses: dict[int, str] = {}  # of the pods that are nodes now
        self._secret = ""

    # ---- what an engine does

    def launch(self, *, attempt: int) -> Endpoint:
        """Put the job's objects in place, or those of the next attempt, and begin it."""
        manifests = self._around(attempt)
        self._place(manifests)
        return self._begin(attempt)

    def alive(self) -> Endpoint | None:
        """Return where the job's coordinator listens, if it lives and answers."""
        try:
            view = self.client(self._endpoint(0)).status()
        except JobError:
            return None
        endpoint = self._endpoint(view.attempt)
        self._directory.announce(endpoint)
        return endpoint if view.job_id == self._job_id else None

    def revive(self) -> Endpoint:
        """Wait for the coordinator that Kubernetes starts in the place of the dead one.

        Raises JobError: there is none in time.
        """
        endpoint = self._directory.endpoint()
        if endpoint is None:
            raise JobError(f"job {self._job_id} was never launched")
        self._around(endpoint.attempt)
        return self._begin(endpoint.attempt)

    def history(self) -> list[AnyEvent]:
        """Fetch what is new from the coordinator, if there is one, and return all.

        Where it does not answer for a while, what is known here is returned. Raises JobError:
        nothing is, and it does not answer in time.
        """
        known = self._mirror.events()
        if not self._has_coordinator():
            return known
        since = known[-1].seq if known else 0
        fetched: list[AnyEvent] = []

        def fetch() -> bool:
            with contextlib.suppress(JobError):
                fetched.extend(self.client(self._endpoint(0)).history(since=since))
                return True
            return not self._has_coordinator()

        limit_s = SILENT_S if known else READY_S
        with contextlib.suppress(*([ApiError] if known else [])):
            wait_until(fetch, f"the journal of job {self._job_id}", limit_s)
        self._mirror.add(fetched)
        return self._mirror.events()

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return what talks to the coordinator: straight, or through the API server."""
        secret = self._known_secret()
        if self._api.is_inside:
            return JobClient(endpoint, secret, straight(endpoint))
        service = f"http:{self._names.coordinator}:{names.POD_PORT}"
        path = self._path("v1", "services", service, "proxy")
        return JobClient(endpoint, secret, self._api.way_to(path))

    def replace(self, node: int) -> None:
        """Have the kind's controller make the pod of a lost node anew.

        It does so by itself once the pod is over; one whose host does not answer is never over.
        """
        self._place_missing()
        address = self._addresses.pop(node, "")
        for pod in self._our_pods() if address else []:
            seen = look_at(pod)
            if seen.ip == address and not seen.is_over:
                self._delete_pod(pod, 0)

    def learn(self, event: AnyEvent) -> None:
        """Note what is said about pods and hosts, and the event itself.

        The journal may be lost with the coordinator's pod: then the copy is all there is.
        """
        self._mirror.add([event])
        self._watching.note(event)
        if isinstance(event, NodeJoined) and event.node >= 0:
            self._addresses[event.node] = event.address
        said = learned_from(self._job_id, event)
        if said is not None:
            self._hosts.note(said)

    def release(self) -> None:
        """Remove all objects of the job, and wait until its pods are gone.

        Raises JobError: an attempt is under way, which somebody else has begun.
        """
        with contextlib.suppress(ApiError):  # without its coordinator it is removed all the same
            if (attempt := under_way(self.history())) is not None:
                raise JobError(f"attempt {attempt} of job {self._job_id} is under way")
        workload = self._workload_path()
        found = find(self._api, workload)
        if found is not None:
            self._delete(workload, found)
        with contextlib.suppress(MissingObjectError):
            self._api.delete(self._path("v1", "configmaps", self._names.root))
        self._end_pods(selector(self._job_id))
        self._wait_collected()

    @contextmanager
    def watch(self, report: Callable[[Sign], None], tell: Callable[[str], None]) -> Iterator[None]:
        """Follow the job's pods meanwhile: what becomes of them is reported, and told."""
        with self._watching.open(self._mirror.events(), report, tell):
            yield

    # ---- placing

    def _around(self, attempt: int) -> Manifests:
        """Put in place all but the workload, as it was or is to be; return the manifests."""
        wanted = self._render(attempt)
        root = ensure(self._api, wanted.root)
        uid = root["metadata"]["uid"]
        secret, *others = wanted.around
        self._keep_secret(ensure(self._api, owned(secret, uid)))
        # With the secret that counts, which may be another process's.
        wanted = self._render(attempt)
        for each in (*others, *wanted.beside):
            self._api.apply(path_of(each), owned(each, uid))
        workload = owned(wanted.workload, uid)
        return msgspec.structs.replace(wanted, root=root, workload=workload)

    def _render(self, attempt: int) -> Manifests:
        return render(
            self._directory.spec(),
            self._pods,
            secret=self._known_secret(),
            attempt=attempt,
            avoid=self._isolated(),
        )

    def _isolated(self) -> tuple[str, ...]:
        return self._hosts.isolated(self._watching.tell)

    def _place(self, wanted: Manifests) -> None:
        """Have the workload run as wanted: a new one, or the one that is there placed anew."""
        path = self._workload_path()
        found = find(self._api, path)
        if found is None:
            ensure(self._api, wanted.workload)
            return
        theirs, ours = self._attempt_of(found), self._attempt_of(wanted.workload)
        if theirs > ours:
            raise JobError(
                f"attempt {theirs} of job {self._job_id} is placed already: this would be {ours}"
            )
        suspend = self._kind.suspend_patch()
        phase = self._kind.status(found).phase
        over = phase in (Phase.SUCCEEDED, Phase.FAILED)
        if theirs == ours and not over and phase is not Phase.SUSPENDED:
            return  # whoever placed it died then, or is another process
        if suspend is None or over:
            self._delete(path, found)
            ensure(self._api, wanted.workload)
            return
        self._api.patch(path, suspend)
        self._end_pods(self._workers())
        what = f"the workload of job {self._job_id} to be suspended"
        wait_until(lambda: self._is_suspended(path), what, GONE_S)
        resume = self._kind.resume_patch(wanted.workload, self._isolated())
        if resume is None:
            self._delete(path, found)
            ensure(self._api, wanted.workload)
        else:
            labels = {"metadata": {"labels": wanted.workload["metadata"]["labels"]}}
            self._api.patch(path, resume | labels)

    def _is_suspended(self, path: str) -> bool:
        """Whether it may be changed: its controller has seen that it is to stand still."""
        found = self._api.get(path)
        active = (found.get("status") or {}).get("active")
        return self._kind.status(found).phase is Phase.SUSPENDED and not active

    def _attempt_of(self, workload: Object) -> int:
        """Which attempt the pods of a workload belong to."""
        holder, key = self._kind.templates(workload)[0]
        labels = (holder[key].get("metadata") or {}).get("labels") or {}
        return int(labels.get(ATTEMPT, -1))

    def _place_missing(self) -> None:
        """Make the workload anew if somebody has removed it."""
        endpoint = self._directory.endpoint()
        if endpoint is not None and find(self._api, self._workload_path()) is None:
            ensure(self._api, self._around(endpoint.attempt).workload)

    def _delete(self, path: str, found: Object) -> None:
        with contextlib.suppress(MissingObjectError):
            self._api.delete(path, uid=found["metadata"]["uid"])
        self._end_pods(self._workers())
        wait_gone(self._api, path, what=f"the workload of job {self._job_id}")

    def _end_pods(self, labels: str) -> None:
        """Have these pods gone: the attempt is over, and nothing in them is waited for.

        One whose host does not answer would stay for ever, and is removed by force.
        """
        asked: dict[str, float] = {}

        def gone() -> bool:
            pods = [pod for pod in self._our_pods(labels) if not look_at(pod).is_over]
            for pod in pods:
                uid, now = pod["metadata"]["uid"], time.monotonic()
                overdue = now - asked.setdefault(uid, now) > ENDED_GRACE_S + OVERDUE_S
                given = pod["metadata"].get("deletionGracePeriodSeconds")
                if overdue or given is None or given > ENDED_GRACE_S:
                    self._delete_pod(pod, 0 if overdue else ENDED_GRACE_S)
            return not pods

        wait_until(gone, f"the pods of job {self._job_id} to go", GONE_S)

    def _delete_pod(self, pod: Object, grace_s: int) -> None:
        path = self._path("v1", "pods", pod["metadata"]["name"])
        with contextlib.suppress(MissingObjectError, ConflictError):
            self._api.delete(path, uid=pod["metadata"]["uid"], grace_s=grace_s)

    def _wait_collected(self) -> None:
        """Wait until all that the job's root owns is gone, too."""
        wait_until(lambda: not self._our_pods(), f"the pods of job {self._job_id} to go", GONE_S)
        for version, plural, name in (
            ("v1", "secrets", self._names.secret),
            ("v1", "services", self._names.coordinator),
            ("v1", "services", self._names.nodes),
        ):
            wait_gone(self._api, self._path(version, plural, name), what=f"{plural}/{name}")

    def _begin(self, attempt: int) -> Endpoint:
        """Wait for the coordinator, and have it begin the attempt if it has not."""
        endpoint = self._endpoint(attempt)
        client, known = self.client(endpoint), self._mirror.events()
        last: list[JobError] = []

        def begun() -> bool:
            with contextlib.suppress(JobError):
                if client.status().attempt == attempt:
                    return True
            try:
                client.begin(attempt, known)
            except LeaseHeldError as error:  # that attempt is over
                raise JobError(str(error)) from error
            except JobError as error:
                last[:] = [error]
            return False

        try:
            wait_until(begun, f"the coordinator of job {self._job_id}", READY_S)
        except ApiError as error:
            pods = [look_at(pod) for pod in self._our_pods()]
            why = [pod.in_words() for pod in pods if pod.reasons] or last or ["no answer"]
            raise JobError(f"{error}: {'; '.join(map(str, why))}") from error
        self._directory.announce(endpoint)
        return endpoint

    # ---- what is there

    def _known_secret(self) -> str:
        """Return the job's secret: that of the cluster, else the one that was made here."""
        if not self._secret:
            found = find(self._api, self._path("v1", "secrets", self._names.secret))
            if found is None:
                return self._directory.secret()
            self._keep_secret(found)
        return self._secret

    def _keep_secret(self, found: Object) -> None:
        self._secret = base64.b64decode(found["data"][names.SECRET_FILE]).decode().strip()
        replace_file(self._directory.path / names.SECRET_FILE, self._secret.encode())

    def _has_coordinator(self) -> bool:
        path = self._path("apps/v1", "deployments", self._names.coordinator)
        return find(self._api, path) is not None

    def _our_pods(self, labels: str = "") -> list[dict[str, Any]]:
        pods = collection("v1", "pods", self._pods.namespace)
        items = self._api.get(pods, labelSelector=labels or selector(self._job_id)).get("items")
        return list(items or ())

    def _workers(self) -> str:
        return self._kind.pods_selector(self._names.workload)

    def _endpoint(self, attempt: int) -> Endpoint:
        host = f"{self._names.coordinator}.{self._pods.namespace}.svc"
        return Endpoint(host=host, port=names.POD_PORT, pid=0, attempt=attempt)

    def _workload_path(self) -> str:
        gvk = self._kind.gvk
        return self._path(gvk.api_version, gvk.plural, self._names.workload)

    def _path(self, version: str, plural: str, *rest: str) -> str:
        return "/".join((collection(version, plural, self._pods.namespace), *rest))
