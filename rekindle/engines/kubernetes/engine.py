"""Run a job's coordinator and nodes as pods of a cluster.

The launching process may end at any moment; the next process finds the objects by the same names.
The engine fetches the journal from the coordinator and keeps a copy in the job's directory. The job
continues from the copy if the pods are gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from rekindle import names
from rekindle.engines.client import ANSWER_S, JobClient, straight
from rekindle.engines.kubernetes.client.api import Api, Object, load
from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.engines.kubernetes.client.objects import wait_until
from rekindle.engines.kubernetes.client.pod_status import pod_status
from rekindle.engines.kubernetes.labels import Role, selector
from rekindle.engines.kubernetes.manifests.render import keeps_off
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.mindcluster.watch import ReportHandlers, watch_hosts
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.pod_membership import LostPods, PodMembership, RetryQueue
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.engines.kubernetes.preflight.preflight import must_fit
from rekindle.engines.kubernetes.watchers.job_watcher import HealthEventQueue, JobWatcher
from rekindle.engines.kubernetes.watchers.node_watcher import LogAndNodeWatchers, load_tables
from rekindle.errors import (
    HopelessError,
    JobError,
    LeaseHeldError,
    OtherVersionError,
    SilentError,
    UsageError,
)
from rekindle.job.journal_reader import JournalCopy
from rekindle.job.spec import Endpoint, JobDirectory, JobSpec, KeepsOff, home
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.journal.attempts import under_way
from rekindle.recovery.journal.host_history import learned_from
from rekindle.recovery.journal.journal import AnyEvent, Isolated

LOST_GRACE_S = 1  # for a pod whose agent is lost: its kubelet still reports its end
READY_S = 300.0  # for a coordinator's pod: the node may have to pull its image
SILENT_S = 20.0  # for a coordinator whose older events are known


def engine_for(directory: JobDirectory) -> KubernetesEngine:
    """Return the engine of the job that this directory describes.

    Raises UsageError: there is no cluster.
    """
    pods = msgspec.json.decode(directory.pods.read_bytes(), type=KubernetesSettings)
    return KubernetesEngine(directory, pods, _api())


def check_cluster(spec: JobSpec, pods: KubernetesSettings) -> None:
    """Check that the cluster has all that a new job needs. Raises as must_fit() does.

    Raises UsageError: there is no cluster.
    """
    must_fit(_api(), spec, pods)


@functools.cache
def _api() -> Api:
    """Return the API server of the default settings: one set of connections in a process."""
    return load()


class KubernetesEngine:
    """Places a job in a cluster.

    directory: the job's directory on this machine, with description, secret and copy of the
    journal.
    """

    def __init__(self, directory: JobDirectory, pods: KubernetesSettings, api: Api) -> None:
        self._directory = directory
        self._pods = pods
        self._api = api
        self._job_id = directory.spec().job_id
        self._journal_copy = JournalCopy(directory.journal_file)
        self._hosts = Hosts(api, pods, home())
        self._placement = Placement(directory, pods, api, self._hosts)
        self._observers = LogAndNodeWatchers(api, pods, directory)
        self._retry_queue = RetryQueue()
        self._job_watcher: JobWatcher | None = None
        self._members = PodMembership(keeps_off=keeps_off(pods) is KeepsOff.AT_ONCE)

    @functools.cached_property
    def _tables(self) -> Tables:
        return load_tables(self._directory.spec().fault_tables)

    # ---- the methods of an engine

    def launch(self, *, attempt: int) -> Endpoint:
        """Create the job's objects, or those of the next attempt, and begin the attempt.

        If the cluster already has a later attempt, the engine joins that one; no process has its
        journal. Raises UsageError: the cluster lacks something, or the user's tables of faults have
        a bad entry; then the engine creates nothing.

        Raises JobError: the coordinator does not answer in time, or its pod cannot run. If the
        coordinator never ran, the engine removes all objects of the job: its other pods would only
        occupy devices.
        """
        spec = self._directory.spec()
        if spec.fault_tables:
            load_tables(spec.fault_tables)
        must_fit(self._api, spec, self._pods)
        attempt = max(attempt, self._placement.attempt())
        self._placement.place(self._placement.around(attempt))
        try:
            return self._begin(attempt)
        except JobError as error:
            with contextlib.suppress(ApiError):  # the first error has the cause
                if isinstance(error, HopelessError) or not self._has_run():
                    self._placement.remove()
            raise

    def described(self) -> JobSpec | None:
        """Return the description of the job that the cluster has, or None.

        Raises UsageError: another version of Rekindle wrote it.
        """
        return self._placement.described()

    def alive(self, *, limit_s: float = ANSWER_S) -> Endpoint | None:
        """Return the address of the job's coordinator if it runs and answers within the limit."""
        try:
            view = self.client(self._endpoint(0)).status(limit_s=limit_s)
        except OtherVersionError:
            raise  # it lives
        except JobError:
            return None
        endpoint = msgspec.structs.replace(self._endpoint(view.attempt), wire=view.wire)
        self._directory.announce(endpoint)
        return endpoint if view.job_id == self._job_id else None

    def revive(self) -> Endpoint:
        """Wait for the coordinator that Kubernetes starts to replace the failed one.

        Kubernetes does not notice a coordinator that hangs, so the engine ends its pod. Raises
        JobError: no coordinator answers in time.
        """
        endpoint = self._directory.endpoint()
        if endpoint is None:
            raise JobError(f"job {self._job_id} has not been launched")
        self._placement.around(endpoint.attempt)
        self._end_silent()
        return self._begin(endpoint.attempt)

    def history(self) -> list[AnyEvent]:
        """Fetch new events from the coordinator, if the job has one, and return all events.

        If the coordinator does not answer for SILENT_S seconds, the result is the copy on this
        machine. The result is empty if the coordinator never ran. Raises JobError: there is no
        copy, and the coordinator does not answer in time.
        """
        known = self._journal_copy.events()
        if not self._placement.has_coordinator():
            return known
        since = known[-1].seq if known else 0
        fetched: list[AnyEvent] = []

        def fetch() -> bool:
            with contextlib.suppress(JobError):
                fetched.extend(self.client(self._endpoint(0)).history(since=since))
                return True
            # A coordinator with a persistent volume may have run in an earlier pod.
            may_have_run = known or self._pods.coordinator.claim or self._has_run()
            return not (self._placement.has_coordinator() and may_have_run)

        limit_s = SILENT_S if known else READY_S
        with contextlib.suppress(*([ApiError] if known else [])):
            wait_until(fetch, f"the journal of job {self._job_id}", limit_s)
        self._journal_copy.add(fetched)
        return self._journal_copy.events()

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return a client of the coordinator: directly, or through the API server."""
        secret = self._placement.secret()
        if self._api.is_inside:
            return JobClient(endpoint, secret, straight(endpoint))
        service = f"http:{self._placement.names.coordinator}:{names.POD_PORT}"
        path = self._placement.path("v1", "services", service, "proxy")
        return JobClient(endpoint, secret, self._api.way_to(path))

    def replace(self, node: int) -> None:
        """Make the kind's controller recreate the pod of a lost node.

        If the pod has ended, its controller recreates it, or its kubelet restarts the container.
        The engine deletes a pod that still runs, and removes it by force if its host does not
        answer. It also deletes a pod that would restart on a host that the job must avoid.
        """
        gone = self._members.take_gone(node)
        what = f"Rekindle cannot replace {'a spare' if node == names.SPARE else f'node {node}'}"
        self._retry_queue.do(what, lambda: self._replace(gone))

    def _replace(self, gone: LostPods) -> None:
        """Exclude isolated hosts for new pods; then end old pods, even after an error."""
        try:
            self._set_right(self._members.isolated)
        finally:
            for pod in self._members.to_end(self._pods_now(), gone):
                self._placement.end_pod(pod, LOST_GRACE_S)

    def _set_right(self, isolated: frozenset[str]) -> None:
        endpoint = self._directory.endpoint()
        if endpoint is None or self._retry_queue.is_given_up:
            return  # another process may have removed the job by now
        if not (self._job_watcher and self._job_watcher.workload_stands()):
            self._placement.place_missing(endpoint.attempt, isolated)
        if isolated:
            self._placement.keep_off(endpoint.attempt, isolated)

    def learn(self, event: AnyEvent) -> None:
        """Record facts about pods and hosts, and copy the event itself.

        The cluster may lose the journal with the coordinator's pod. Then the copy is the only one.
        """
        self._journal_copy.add([event])
        self._observers.note(event)
        self._members.learn(event)
        if isinstance(event, Isolated) and self._job_watcher is not None:
            what = f"Rekindle cannot keep the job's pods off {event.host}"
            self._retry_queue.do(what, lambda: self._replace(LostPods()))
        entry = learned_from(self._job_id, event)
        if entry is not None:
            noted = functools.partial(self._hosts.note, entry)
            self._retry_queue.do(f"Rekindle cannot record the event of {entry.host}", noted)

    def release(self) -> None:
        """Remove all objects of the job, and wait until its pods are gone.

        Raises JobError: an attempt runs, which another process has begun.
        """
        with contextlib.suppress(ApiError):  # remove the job without it
            if (attempt := under_way(self.history())) is not None:
                raise JobError(f"attempt {attempt} of job {self._job_id} still runs")
        self._placement.remove()

    @contextmanager
    def watch(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Follow the job's pods and the state of their devices until the block ends.

        `report` takes a health event. `tell` takes a text for users.
        """
        self._hosts.tell = tell
        for event in self._journal_copy.events():
            self._observers.note(event)
        with HealthEventQueue(report, tell).open() as say:
            watcher = JobWatcher(
                self._api, self._placement, self._job_id, self._members.node_of, say, tell
            )
            handlers = ReportHandlers(
                report, tell, watcher.known, self._members.at, self._journal_copy.events()
            )
            self._job_watcher = watcher
            try:
                with (
                    self._observers.open(say, tell) as see,
                    watcher.open(see),
                    watch_hosts(self._api, self._pods, self._directory.spec(), handlers),
                    self._retry_queue.open(tell),
                ):
                    yield
            finally:
                self._job_watcher = None

    # ---- start of an attempt

    def _end_silent(self) -> None:
        """End the coordinator's pod if its container runs, but does not answer in time.

        A later pod of the same name stays, because the order has the uid of this one.
        """

        def runs(pod: Object) -> bool:
            status = pod_status(pod)
            return status.role == Role.COORDINATOR.value and status.started > 0

        running = [*filter(runs, self._pods_now(Role.COORDINATOR))]
        try:
            self.client(self._endpoint(0)).status()
        except SilentError:
            for pod in running:
                self._placement.end_pod(pod, LOST_GRACE_S)
        except JobError:
            return  # it does not listen: Kubernetes starts it

    def _begin(self, attempt: int) -> Endpoint:
        """Wait for the coordinator, and order it to begin the attempt if it has not begun."""
        endpoint = self._endpoint(attempt)
        client, known = self.client(endpoint), self._journal_copy.events()
        last: list[JobError] = []

        def begun() -> bool:
            self._must_be_possible()
            with contextlib.suppress(JobError):
                if client.status().attempt == attempt:
                    return True
            try:
                client.begin(attempt, known)
            except LeaseHeldError as error:  # that attempt is over
                raise JobError(str(error)) from error
            except UsageError as error:  # the image has an invalid file
                raise HopelessError(str(error)) from error
            except JobError as error:
                last[:] = [error]
            return False

        try:
            wait_until(begun, f"the coordinator of job {self._job_id}", READY_S)
        except ApiError as error:
            why = self._placement.coordinator_words() or last or ["no answer"]
            raise JobError(f"{error}: {'; '.join(map(str, why))}") from error
        self._directory.announce(endpoint)
        return endpoint

    def _must_be_possible(self) -> None:
        """Check that the coordinator's pod can run. Raises HopelessError: it can never run."""
        for pod in self._pods_now(Role.COORDINATOR):
            status = pod_status(pod)
            for reason in status.reasons if status.role == Role.COORDINATOR.value else ():
                verdict = self._tables.pod_reason(reason.word)
                if verdict.kind is FaultKind.USER_CODE:
                    raise HopelessError(f"{status.in_words()}: {verdict.explanation}")

    def _has_run(self) -> bool:
        """Return whether the coordinator's container ever started."""
        pods = map(pod_status, self._pods_now(Role.COORDINATOR))
        return any(pod.has_run for pod in pods if pod.role == Role.COORDINATOR.value)

    # ---- the job's objects

    def _pods_now(self, role: Role | None = None) -> list[Object]:
        """Return the job's pods, from the watch if there is one.

        role: without a watch, return only pods of this role.
        """
        known = self._job_watcher.pods() if self._job_watcher is not None else None
        return self._placement.our_pods(selector(self._job_id, role)) if known is None else known

    def _endpoint(self, attempt: int) -> Endpoint:
        host = f"{self._placement.names.coordinator}.{self._pods.namespace}.svc"
        return Endpoint(host=host, port=names.POD_PORT, pid=0, attempt=attempt)
