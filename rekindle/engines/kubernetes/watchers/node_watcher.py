"""Watch the cluster's nodes and the output of pods while a process steers the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle import names
from rekindle.engines.kubernetes.client.api import Api, Object, may
from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.engines.kubernetes.client.informer import Informer, beside
from rekindle.engines.kubernetes.client.objects import collection
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

REMOVED = "Exists=False"  # the Node object was deleted; Kubernetes has no such condition

_Ailments = dict[str, str]  # conditions, as Type=Status, and their messages


class NodeWatcher:
    """A thread that follows all nodes, if it has the right; it keeps only their bad conditions.

    fault_tables: the user's own file; "": none.
    """

    def __init__(self, api: Api, fault_tables: str = "") -> None:
        self._api = api
        self._fault_tables = fault_tables
        self._hosts: dict[int, str] = {}  # hosts of the job's nodes, now or when they were lost
        self._ailing: dict[str, _Ailments] = {}
        self._lock = threading.Lock()
        self._report: Callable[[HealthEvent], None] = lambda health_event: None  # before open()

    @contextmanager
    def open(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Follow nodes until the block ends. `report` takes an event, `tell` a sentence."""
        self._report = report
        follower = Informer(self._api, NODES, keep=_conditions_alone)
        with beside({"nodes": lambda: self._follow(follower, tell)}, follower.end, CLOSE_S):
            yield

    def joined(self, node: int, host: str) -> None:
        """Record the host of a node, and report the host's bad conditions."""
        with self._lock:
            self._hosts[node] = host
            present = list(self._ailing.get(host, ()))
        for condition in present:
            self._say(node, host, condition, gone=False)

    def _follow(self, follower: Informer, tell: Callable[[str], None]) -> None:
        try:
            if not may(self._api, "watch", "nodes"):
                return  # the agents' connections report losses
            tables = load_tables(self._fault_tables)
            if not has_user_file(self._fault_tables):
                tell(
                    f"the file {self._fault_tables} does not exist on this machine, so Rekindle "
                    "does not report conditions of nodes that only this file lists"
                )
            for node, there in follower.changes():
                ailments = _ailments(node, tables) if there else {REMOVED: "it was removed"}
                self._look(node["metadata"]["name"], ailments, tell)
        except (ApiError, UsageError) as error:
            tell(f"Rekindle cannot watch the nodes: {error}")

    def _look(self, host: str, now: _Ailments, tell: Callable[[str], None]) -> None:
        with self._lock:
            before = self._ailing.pop(host, {})
            if now:
                self._ailing[host] = now
            nodes = [node for node, where in self._hosts.items() if where == host]
        for condition in (*before.keys() - now.keys(), *now.keys() - before.keys()):
            gone = condition not in now
            if nodes:
                change = " is over" if gone else f": {now[condition]}" if now[condition] else ""
                tell(f"node {host} of the cluster: {condition}{change}")
            for node in nodes:
                self._say(node, host, condition, gone=gone)

    def _say(self, node: int, host: str, condition: str, *, gone: bool) -> None:
        self._report(
            HealthEvent(
                source=EventSource.NODE_CONDITION,
                what=condition,
                node=node,
                gone=gone,
                by=BY,
                host=host,
            )
        )


def _ailments(node: Object, tables: Tables) -> _Ailments:
    """Return the conditions to which the tables of faults assign an urgency."""
    return {
        f"{each['type']}={each['status']}": " ".join((each.get("message") or "").split())[:300]
        for each in (node.get("status") or {}).get("conditions") or ()
        if tables.node_condition(each["type"], each["status"]).urgency is not Urgency.NONE
    }


def _conditions_alone(node: Object) -> Object:
    """Remove all other fields, such as the list of images: about 20 kB of each node."""
    metadata = {key: node["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    conditions = (node.get("status") or {}).get("conditions") or []
    return {"metadata": metadata, "status": {"conditions": conditions}}


def has_user_file(user_file: str) -> bool:
    """Return whether the job has no tables of its own, or this machine also has their file."""
    return not user_file or Path(user_file).is_file()


def load_tables(user_file: str) -> Tables:
    """Read the tables, and the user's file if this machine has it; the image of the pods has it.

    The coordinator reads the file of its image, and refuses an invalid one.

    Raises UsageError: the file here is invalid.
    """
    return Tables.load(Path(user_file) if user_file and has_user_file(user_file) else None)


class LogAndNodeWatchers:
    """The observers of one job. They may be opened again after they are closed."""

    def __init__(self, api: Api, pods: KubernetesSettings, directory: JobDirectory) -> None:
        self._api = api
        self._pods = collection("v1", "pods", pods.namespace)
        self._container = container_name(pods.kind)
        self._folder = directory.path / names.LOGS_DIRECTORY
        self._addresses: dict[int, str] = {}  # addresses of the nodes, now or when they were lost
        self._node_watcher = NodeWatcher(api, directory.spec().fault_tables)
        self._logs: PodLogs | None = None  # while it is open
        self._tell: Callable[[str], None] = print

    @contextmanager
    def open(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> Iterator[Callable[[Object, bool], None]]:
        """Observe until the block ends; yield the function that takes pods and their existence."""
        self._tell = tell
        self._logs = logs = PodLogs(self._api, self._folder, self._pods, self._container)
        try:
            with logs.open(tell), self._node_watcher.open(report, tell):
                yield logs.see
        finally:
            self._logs = None

    def note(self, event: AnyEvent) -> None:
        """Record the pod of each node; log where the output of a lost node is."""
        match event:
            case NodeJoined(node=node, address=address, host=host) if node >= 0:
                self._addresses[node] = address
                self._node_watcher.joined(node, host)
            case FaultSeen(fault=fault, explained=False) if fault.kind is FaultKind.NODE_LOST:
                file = self._logs and self._logs.file_of(self._addresses.get(fault.node, ""))
                if file:
                    self._tell(f"the output of lost node {fault.node} is in {file}")
