"""What else is looked at while a job is steered: what its pods put out, the cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle import names
from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.objects import collection
from rekindle.engines.kubernetes.manifests.pod_template import container_name
from rekindle.engines.kubernetes.manifests.settings import Pods
from rekindle.engines.kubernetes.watchers.node_watcher import NodeEyes
from rekindle.engines.kubernetes.watchers.pod_logs import PodLogs
from rekindle.job.spec import JobDirectory
from rekindle.recovery.faults.classification import Sign
from rekindle.recovery.faults.fault import Kind
from rekindle.recovery.journal.journal import AnyEvent, FaultSeen, NodeJoined


class Observers:
    """Looks at one job; it may be opened again once it is closed."""

    def __init__(self, api: Api, pods: Pods, directory: JobDirectory) -> None:
        self._api = api
        self._pods = collection("v1", "pods", pods.namespace)
        self._container = container_name(pods.kind)
        self._folder = directory.path / names.LOGS_DIRECTORY
        self._addresses: dict[int, str] = {}  # of the nodes now, or when they were lost
        self._node_eyes = NodeEyes(api)
        self._logs: PodLogs | None = None  # while it is open
        self._tell: Callable[[str], None] = print

    @contextmanager
    def open(
        self, report: Callable[[Sign], None], tell: Callable[[str], None]
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
            case FaultSeen(fault=fault, known=False) if fault.kind is Kind.NODE_LOST:
                file = self._logs and self._logs.file_of(self._addresses.get(fault.node, ""))
                if file:
                    self._tell(f"the output of lost node {fault.node} is in {file}")
            case _:
                pass
