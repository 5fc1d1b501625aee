"""What a job in a cluster knows of hosts, and says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rekindle.engines.host_log import HostLog
from rekindle.engines.kubernetes.client.api import Api
from rekindle.engines.kubernetes.manifests.settings import Isolation, Pods
from rekindle.engines.kubernetes.placement.host_log import ClusterHostLog
from rekindle.engines.kubernetes.placement.quarantine import Mark, Marks
from rekindle.errors import JobError
from rekindle.recovery.journal.host_history import AnyHostEvent, HostIsolated, fold

_LONGEST_REASON = 300


class Hosts:
    """The cluster's log of hosts; this machine's has what could not be written there.

    home: the folder of this machine's log. tell: takes a sentence about what is amiss.
    """

    def __init__(self, api: Api, pods: Pods, home: Path) -> None:
        self.tell: Callable[[str], None] = print
        self._here = HostLog(home)
        self._log = ClusterHostLog(api, pods.namespace)
        self._marks = Marks(api)
        self._namespace = pods.namespace
        self._how = pods.isolated_hosts

    def isolated(self) -> tuple[str, ...]:
        """Return the hosts on which nothing is placed, by what was said of each last.

        Raises JobError: this machine's log cannot be read.
        """
        said = self._here.events()
        try:
            said += self._log.events()
        except JobError as error:
            self.tell(f"which hosts other machines have isolated is not known: {error}")
        known = fold(sorted(said, key=lambda event: event.at))
        return tuple(sorted(host.host for host in known.values() if host.isolated))

    def note(self, event: AnyHostEvent) -> None:
        """Take down what was learned of a host, and mark the node of one that is isolated.

        Telling it twice does no harm. Raises JobError: it is known to this machine alone, if at
        all, or the node cannot be marked.
        """
        try:
            self._log.append(event)
        except JobError as error:
            self._here.append(event)
            raise JobError(
                f"what happened on {event.host} is known to this machine alone: {error}"
            ) from error
        if isinstance(event, HostIsolated) and self._how is not Isolation.AVOID:
            try:
                self._mark(event)
            except JobError as error:
                raise JobError(
                    f"{event.host} is isolated, but others may use it: {error}"
                ) from error

    def _mark(self, event: HostIsolated) -> None:
        if not self._is_isolated(event):
            return  # it was released since
        mark = Mark(
            how=self._how,
            by=event.by,
            namespace=self._namespace,
            reason=event.reason[:_LONGEST_REASON],
            at=event.at,
            source=f"{event.source}@{event.at}",
        )
        self._marks.put(event.host, mark)
        if not self._is_isolated(event):  # a person has released it while it was marked
            self._marks.take(event.host, self._namespace)

    def _is_isolated(self, event: HostIsolated) -> bool:
        host = self._log.hosts().get(event.host)
        return host is not None and bool(host.isolated)
