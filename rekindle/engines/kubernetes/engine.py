"""The Kubernetes engine: a job's coordinator and nodes as pods of a cluster.

Whoever launches may die at any moment, and the next one finds the same names. The coordinator's
journal is fetched from it and kept in the job's directory; it goes on there when the pods are gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from rekindle import names
from rekindle.engines.client import JobClient, straight
from rekindle.engines.kubernetes.client.api import Api, Object, load
from rekindle.engines.kubernetes.client.errors import ApiError
from rekindle.engines.kubernetes.client.objects import wait_until
from rekindle.engines.kubernetes.client.pod_status import pod_status
from rekindle.engines.kubernetes.fault_tables import load_tables
from rekindle.engines.kubernetes.labels import Role, selector
from rekindle.engines.kubernetes.manifests.render import keeps_off
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.mindcluster.watch import ReportHandlers, watch_hosts
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.pod_membership import LostPods, PodMembership, RetryQueue
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.engines.kubernetes.preflight.preflight import must_fit
from rekindle.engines.kubernetes.watchers.job_watcher import HealthEventQueue, JobWatcher
from rekindle.engines.kubernetes.watchers.node_watcher import LogAndNodeWatchers
from rekindle.errors import JobError, LeaseHeldError, UsageError
from rekindle.job.journal_reader import JournalCopy
from rekindle.job.spec import Endpoint, JobDirectory, KeepsOff, home
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.journal.attempts import under_way
from rekindle.recovery.journal.host_history import learned_from
from rekindle.recovery.journal.journal import AnyEvent, Isolated

LOST_GRACE_S = 1  # for a pod whose agent is lost: its kubelet still tells how it ended
READY_S = 300.0  # for a coordinator's pod: its image may have to be pulled
SILENT_S = 20.0  # of a coordinator whose journal is known but for the newest events


def engine_for(directory: JobDirectory) -> KubernetesEngine:
    """Return the engine of a job that is described in this directory.

    Raises UsageError: there is no cluster.
    """
    pods = msgspec.json.decode(directory.pods.read_bytes(), type=KubernetesSettings)
    return KubernetesEngine(directory, pods, _api())


@functools.cache
def _api() -> Api:
    """The cluster that the usual settings name: one set of connections in a process."""
    return load()


class HopelessError(JobError):
    """The job's pods cannot run as they are described."""


class KubernetesEngine:
    """Places a job in a cluster.

    directory: the job's on this machine: its description, its secret, the copy of its journal.
    """

    def __init__(self, directory: JobDirectory, pods: KubernetesSettings, api: Api) -> None:
        self._directory = directory
        self._pods = pods
        self._api = api
        self._job_id = directory.spec().job_id
        self._mirror = JournalCopy(directory.journal_file)
        self._hosts = Hosts(api, pods, home())
        self._place = Placement(directory, pods, api, self._hosts)
        self._observers = LogAndNodeWatchers(api, pods, directory)
        self._chores = RetryQueue()
        self._eyes: JobWatcher | None = None
        self._members = PodMembership(keeps_off=keeps_off(pods) is KeepsOff.AT_ONCE)

    @functools.cached_property
    def _tables(self) -> Tables:
        return load_tables(self._directory.spec().fault_tables)

    # ---- what an engine does

    def launch(self, *, attempt: int) -> Endpoint:
        """Put the job's objects in place, or those of the next attempt, and begin it.

        Where a later attempt than this is placed, that is joined: its journal is known to nobody.
        Raises UsageError: the cluster lacks something, or the user's tables of faults have a bad
        entry; then nothing was made.
        Raises JobError: the coordinator does not answer in time, or its pod cannot run. Where it
        never ran, nothing of the job is left: its other pods would only take devices.
        """
        spec = self._directory.spec()
        if spec.fault_tables:
            load_tables(spec.fault_tables)
        must_fit(self._api, spec, self._pods)
        attempt = max(attempt, self._place.attempt())
        self._place.place(self._place.around(attempt))
        try:
            return self._begin(attempt)
        except JobError as error:
            with contextlib.suppress(ApiError):  # why it does not run is what is told
                if isinstance(error, HopelessError) or not self._has_run():
                    self._place.remove()
            raise

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
        self._place.around(endpoint.attempt)
        return self._begin(endpoint.attempt)

    def history(self) -> list[AnyEvent]:
        """Fetch what is new from the coordinator, if there is one, and return all.

        Where it does not answer for a while, what is known here is returned; nothing, where it has
        never run. Raises JobError: nothing is known, and it does not answer in time.
        """
        known = self._mirror.events()
        if not self._place.has_coordinator():
            return known
        since = known[-1].seq if known else 0
        fetched: list[AnyEvent] = []

        def fetch() -> bool:
            with contextlib.suppress(JobError):
                fetched.extend(self.client(self._endpoint(0)).history(since=since))
                return True
            # One whose volume stays may have run in a pod that is gone.
            may_have_run = known or self._pods.coordinator.claim or self._has_run()
            return not (self._place.has_coordinator() and may_have_run)

        limit_s = SILENT_S if known else READY_S
        with contextlib.suppress(*([ApiError] if known else [])):
            wait_until(fetch, f"the journal of job {self._job_id}", limit_s)
        self._mirror.add(fetched)
        return self._mirror.events()

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return what talks to the coordinator: straight, or through the API server."""
        secret = self._place.secret()
        if self._api.is_inside:
            return JobClient(endpoint, secret, straight(endpoint))
        service = f"http:{self._place.names.coordinator}:{names.POD_PORT}"
        path = self._place.path("v1", "services", service, "proxy")
        return JobClient(endpoint, secret, self._api.way_to(path))

    def replace(self, node: int) -> None:
        """Have the kind's controller make the pod of a lost node anew.

        It does so by itself once the pod is over, or its kubelet starts the container anew. One
        that runs still is told to end, and is removed where its host does not answer; so is one
        that would be started anew where nothing is to be.
        """
        gone = self._members.take_gone(node)
        what = f"{'a spare' if node == names.SPARE else f'node {node}'} cannot be replaced"
        self._chores.do(what, lambda: self._replace(gone))

    def _replace(self, gone: LostPods) -> None:
        """Have what is made anew keep off isolated hosts; then end what is to go, come what may."""
        try:
            self._set_right(self._members.isolated)
        finally:
            for pod in self._members.to_end(self._pods_now(), gone):
                self._place.end_pod(pod, LOST_GRACE_S)

    def _set_right(self, isolated: frozenset[str]) -> None:
        endpoint = self._directory.endpoint()
        if endpoint is None or self._chores.is_given_up:
            return  # the job may be removed by now
        if not (self._eyes and self._eyes.workload_stands()):
            self._place.place_missing(endpoint.attempt, isolated)
        if isolated:
            self._place.keep_off(endpoint.attempt, isolated)

    def learn(self, event: AnyEvent) -> None:
        """Note what is said about pods and hosts, and the event itself.

        The journal may be lost with the coordinator's pod: then the copy is all there is.
        """
        self._mirror.add([event])
        self._observers.note(event)
        self._members.learn(event)
        if isinstance(event, Isolated) and self._eyes is not None:
            what = f"the job's pods do not keep off {event.host}"
            self._chores.do(what, lambda: self._replace(LostPods()))
        said = learned_from(self._job_id, event)
        if said is not None:
            noted = functools.partial(self._hosts.note, said)
            self._chores.do(f"what was learned of {said.host} is not noted", noted)

    def release(self) -> None:
        """Remove all objects of the job, and wait until its pods are gone.

        Raises JobError: an attempt is under way, which somebody else has begun.
        """
        with contextlib.suppress(ApiError):  # without its coordinator it is removed all the same
            if (attempt := under_way(self.history())) is not None:
                raise JobError(f"attempt {attempt} of job {self._job_id} is under way")
        self._place.remove()

    @contextmanager
    def watch(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Follow the job's pods meanwhile, and what is known of their devices: report, and tell."""
        self._hosts.tell = tell
        for event in self._mirror.events():
            self._observers.note(event)
        with HealthEventQueue(report, tell).open() as say:
            eyes = JobWatcher(
                self._api, self._place, self._job_id, self._members.node_of, say, tell
            )
            ears = ReportHandlers(report, tell, eyes.known, self._members.at, self._mirror.events())
            self._eyes = eyes
            try:
                with (
                    self._observers.open(say, tell) as see,
                    eyes.open(see),
                    watch_hosts(self._api, self._pods, self._directory.spec(), ears),
                    self._chores.open(tell),
                ):
                    yield
            finally:
                self._eyes = None

    # ---- beginning

    def _begin(self, attempt: int) -> Endpoint:
        """Wait for the coordinator, and have it begin the attempt if it has not."""
        endpoint = self._endpoint(attempt)
        client, known = self.client(endpoint), self._mirror.events()
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
            except UsageError as error:  # the files in its image
                raise HopelessError(str(error)) from error
            except JobError as error:
                last[:] = [error]
            return False

        try:
            wait_until(begun, f"the coordinator of job {self._job_id}", READY_S)
        except ApiError as error:
            why = self._place.coordinator_words() or last or ["no answer"]
            raise JobError(f"{error}: {'; '.join(map(str, why))}") from error
        self._directory.announce(endpoint)
        return endpoint

    def _must_be_possible(self) -> None:
        """Raise HopelessError: the coordinator's pod cannot run, however long one waits."""
        for pod in self._pods_now(Role.COORDINATOR):
            seen = pod_status(pod)
            for reason in seen.reasons if seen.role == Role.COORDINATOR.value else ():
                verdict = self._tables.pod_reason(reason.word)
                if verdict.kind is FaultKind.USER_CODE:
                    raise HopelessError(f"{seen.in_words()}: {verdict.explanation}")

    def _has_run(self) -> bool:
        """Whether the coordinator's container was ever started: its image may still be fetched."""
        pods = map(pod_status, self._pods_now(Role.COORDINATOR))
        return any(pod.has_run for pod in pods if pod.role == Role.COORDINATOR.value)

    # ---- what is there

    def _pods_now(self, role: Role | None = None) -> list[Object]:
        """Return the job's pods: as they were a moment ago, where they are watched.

        role: no others are asked for, where they are not.
        """
        known = self._eyes.pods() if self._eyes is not None else None
        return self._place.our_pods(selector(self._job_id, role)) if known is None else known

    def _endpoint(self, attempt: int) -> Endpoint:
        host = f"{self._place.names.coordinator}.{self._pods.namespace}.svc"
        return Endpoint(host=host, port=names.POD_PORT, pid=0, attempt=attempt)
