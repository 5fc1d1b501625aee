"""What is looked at while a job is steered: its pods, their output, the cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rekindle import names
from rekindle.engines.kubernetes.api import Api
from rekindle.engines.kubernetes.eyes import Eyes
from rekindle.engines.kubernetes.labels import selector
from rekindle.engines.kubernetes.node_eyes import NodeEyes
from rekindle.engines.kubernetes.objects import collection
from rekindle.engines.kubernetes.pod_logs import PodLogs
from rekindle.engines.kubernetes.pods import Pods
from rekindle.engines.kubernetes.template import container_name
from rekindle.recovery.classification import Sign
from rekindle.recovery.fault import Kind
from rekindle.recovery.journal import AnyEvent, FaultSeen, NodeJoined
from rekindle.runtime.spec import JobDirectory


class Watching:
    """Looks at one job; it may be opened again once it is closed."""

    def __init__(self, api: Api, pods: Pods, directory: JobDirectory, job_id: str) -> None:
        self._api = api
        self._pods = collection("v1", "pods", pods.namespace)
        self._selector = selector(job_id)
        self._container = container_name(pods.kind)
        self._folder = directory.path / names.LOGS_DIRECTORY
        self._nodes: dict[str, int] = {}  # what the pods of addresses are, or were
        self._addresses: dict[int, str] = {}  # of the nodes now, or when they were lost
        self._node_eyes = NodeEyes(api)
        self._logs: PodLogs | None = None  # while it is open
        self.tell: Callable[[str], None] = print

    @contextmanager
    def open(
        self,
        known: Iterable[AnyEvent],
        report: Callable[[Sign], None],
        tell: Callable[[str], None],
    ) -> Iterator[None]:
        """Look meanwhile. known: of the job's journal."""
        for event in known:
            self.note(event)
        self.tell = tell
        logs = PodLogs(self._api, self._folder, self._pods, self._container)
        eyes = Eyes(self._api, self._pods, self._selector, self._nodes.get, report, tell)
        with logs.open(tell), eyes.open(logs.see), self._node_eyes.open(report, tell):
            self._logs = logs
            try:
                yield
            finally:
                self._logs = None

    def note(self, event: AnyEvent) -> None:
        """Know which pod is which node; say where the output of one that is lost is."""
        match event:
            case NodeJoined(node=node, address=address, host=host) if node >= 0:
                self._addresses[node], self._nodes[address] = address, node
                self._node_eyes.joined(node, host)
            case FaultSeen(fault=fault, known=False) if fault.kind is Kind.NODE_LOST:
                file = self._logs and self._logs.file_of(self._addresses.get(fault.node, ""))
                if file:
                    self.tell(f"the output of lost node {fault.node} is in {file}")
            case _:
                pass
