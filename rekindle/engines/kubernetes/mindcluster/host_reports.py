"""What is known of all hosts, folded from MindCluster's ConfigMaps as they change. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.documents import name_of
from rekindle.engines.kubernetes.mindcluster.readers import COMPLETE, NODES, read
from rekindle.engines.kubernetes.mindcluster.reports import Report, Told, Topic

_Place = tuple[str, Topic]  # a host, and what of it


class Known:
    """The last word of each host that could be trusted, and what could not be."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[Topic, tuple[str, Report]]] = {}  # with who said so
        self._damage: dict[_Place, str] = {}
        self._broken: dict[str, str] = {}  # ConfigMaps of which nothing can be read

    def take(self, configmap: Object, *, there: bool) -> None:
        """Take a ConfigMap that is new, has changed, or is gone; one that is damaged is no news."""
        name = name_of(configmap)
        self._broken.pop(name, None)
        if not there:
            # NodeD removes that of a sound board. What chips have is not mended by its silence.
            if name.startswith(NODES):
                self._forget(name.removeprefix(NODES), Topic.BOARD, name)
            return
        try:
            told = read(configmap)
        except DamagedError as error:
            self._broken[name] = str(error)
            return
        for one in told:
            self._hear(name, one)
        if name.startswith(COMPLETE):
            heard = {one.host for one in told}
            for host in [host for host in self._reports if host not in heard]:
                self._forget(host, Topic.BOARD, name)

    def of(self, host: str) -> list[Report]:
        """Return what is known of a host."""
        return [report for _, report in self._reports.get(host, {}).values()]

    def damage(self, host: str) -> list[str]:
        """Return what of a host could not be trusted when it was read last."""
        own = [text for (where, _), text in self._damage.items() if where == host]
        return own + list(self._broken.values())

    def _hear(self, name: str, told: Told) -> None:
        if told.report is None:
            self._damage[told.host, told.topic] = told.damage
            return
        self._damage.pop((told.host, told.topic), None)
        topics = self._reports.setdefault(told.host, {})
        by, before = topics.get(told.topic, (name, Report()))
        # A host may move from one of ClusterD's parts to another, and stand in both meanwhile.
        if by == name or told.report.updated >= before.updated:
            topics[told.topic] = name, told.report

    def _forget(self, host: str, topic: Topic, name: str) -> None:
        if self._reports.get(host, {}).get(topic, ("",))[0] == name:
            del self._reports[host][topic]
            self._damage.pop((host, topic), None)
