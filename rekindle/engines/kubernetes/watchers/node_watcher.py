"""Watches the cluster's nodes and the output of pods while a process steers the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle import names
from rekindle.engines.kubernetes.client.api import Api, Object, may
from rekindle.engines.kubernetes.client.errors import ApiError
from rekindle.engines.kubernetes.client.informer import Informer, beside
from rekindle.engines.kubernetes.client.objects import collection
from rekindle.engines.kubernetes.fault_tables import has_user_file, load_tables
from rekindle.engines.kubernetes.manifests.pod_template import container_name
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.placement.quarantine import NODES
from rekindle.engines.kubernetes.watchers.job_watcher import BY, CLOSE_S
from rekindle.engines.kubernetes.watchers.pod_logs import PodLogs
from rekindle.errors import UsageError
from rekindle.job.spec import JobDirectory
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal.journal import AnyEvent, FaultSeen, NodeJoined

REMOVED = "Exists=False"  # no condition of Kubernetes': the Node object was deleted

_Ailments = dict[str, str]  # conditions, as Type=Status, and what is said of them


class NodeWatcher:
    """One thread that follows all nodes, if we may; of each it keeps what ails it, and no more.

    fault_tables: the user's own file; empty: there is none.
    """

    def __init__(self, api: Api, fault_tables: str = "") -> None:
        self._api = api
        self._fault_tables = fault_tables
        self._hosts: dict[int, str] = {}  # of the job's nodes now, or when they were lost
        self._ailing: dict[str, _Ailments] = {}
        self._lock = threading.Lock()
        self._report: Callable[[HealthEvent], None] = _to_nobody

    @contextmanager
    def open(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Follow meanwhile. report: takes a sign. tell: takes a sentence."""
        self._report = report
        follower = Informer(self._api, NODES, keep=_conditions_alone)
        with beside({"nodes": lambda: self._follow(follower, tell)}, follower.end, CLOSE_S):
            yield

    def joined(self, node: int, host: str) -> None:
        """Know that a node of the job is on this host from now on; what ails that is reported."""
        with self._lock:
            self._hosts[node] = host
            present = list(self._ailing.get(host, ()))
        for condition in present:
            self._say(node, host, condition, gone=False)

    def _follow(self, follower: Informer, tell: Callable[[str], None]) -> None:
        try:
            if not may(self._api, "watch", "nodes"):
                return  # the agents' own lines tell of what is lost
            tables = load_tables(self._fault_tables)
            if not has_user_file(self._fault_tables):
                tell(
                    f"there is no file {self._fault_tables} on this machine: conditions of nodes "
                    "that it alone lists are not reported"
                )
            for node, there in follower.changes():
                ailments = _ailments(node, tables) if there else {REMOVED: "it was removed"}
                self._look(node["metadata"]["name"], ailments, tell)
        except (ApiError, UsageError) as error:
            tell(f"the nodes cannot be watched: {error}")

    def _look(self, host: str, now: _Ailments, tell: Callable[[str], None]) -> None:
        with self._lock:
            before = self._ailing.pop(host, {})
            if now:
                self._ailing[host] = now
            nodes = [node for node, where in self._hosts.items() if where == host]
        for condition in (*before.keys() - now.keys(), *now.keys() - before.keys()):
            gone = condition not in now
            if nodes:
                said = " is over" if gone else f": {now[condition]}" if now[condition] else ""
                tell(f"node {host} of the cluster: {condition}{said}")
            for node in nodes:
                self._say(node, host, condition, gone=gone)

    def _say(self, node: int, host: str, condition: str, *, gone: bool) -> None:
        sign = HealthEvent(
            source=EventSource.NODE_CONDITION,
            what=condition,
            node=node,
            gone=gone,
            by=BY,
            host=host,
        )
        self._report(sign)


def _ailments(node: Object, tables: Tables) -> _Ailments:
    """Return the conditions that the tables of faults know as anything but well."""
    return {
        f"{each['type']}={each['status']}": " ".join((each.get("message") or "").split())[:300]
        for each in (node.get("status") or {}).get("conditions") or ()
        if tables.node_condition(each["type"], each["status"]).urgency is not Urgency.NONE
    }


def _conditions_alone(node: Object) -> Object:
    """Leave out the rest, such as the images that are there: some 20 kB of each node."""
    metadata = {key: node["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    conditions = (node.get("status") or {}).get("conditions") or []
    return {"metadata": metadata, "status": {"conditions": conditions}}


def _to_nobody(sign: HealthEvent) -> None:
    """Before anybody watches."""


class LogAndNodeWatchers:
    """Looks at one job; it may be opened again once it is closed."""

    def __init__(self, api: Api, pods: KubernetesSettings, directory: JobDirectory) -> None:
        self._api = api
        self._pods = collection("v1", "pods", pods.namespace)
        self._container = container_name(pods.kind)
        self._folder = directory.path / names.LOGS_DIRECTORY
        self._addresses: dict[int, str] = {}  # of the nodes now, or when they were lost
        self._node_eyes = NodeWatcher(api, directory.spec().fault_tables)
        self._logs: PodLogs | None = None  # while it is open
        self._tell: Callable[[str], None] = print

    @contextmanager
    def open(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[Callable[[Object, bool], None]]:
        """Look meanwhile; what is yielded is to be told of each pod, and if it is there."""
        self._tell = tell
        self._logs = logs = PodLogs(self._api, self._folder, self._pods, self._container)
        try:
            with logs.open(tell), self._node_eyes.open(report, tell):
                yield logs.see
        finally:
            self._logs = None

    def note(self, event: AnyEvent) -> None:
        """Know which pod is which node; say where the output of one that is lost is."""
        match event:
            case NodeJoined(node=node, address=address, host=host) if node >= 0:
                self._addresses[node] = address
                self._node_eyes.joined(node, host)
            case FaultSeen(fault=fault, known=False) if fault.kind is FaultKind.NODE_LOST:
                file = self._logs and self._logs.file_of(self._addresses.get(fault.node, ""))
                if file:
                    self._tell(f"the output of lost node {fault.node} is in {file}")
            case _:
                pass
