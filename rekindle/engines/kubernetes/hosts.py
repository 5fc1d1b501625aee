"""What a job in a cluster knows of hosts, and says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rekindle.engines.host_log import HostLog
from rekindle.engines.kubernetes.api import Api
from rekindle.engines.kubernetes.host_log import ClusterHostLog
from rekindle.engines.kubernetes.pods import Pods
from rekindle.errors import JobError
from rekindle.recovery.hosts import AnyHostEvent


class Hosts:
    """The cluster's log of hosts; this machine's has what could not be written there.

    home: the folder of this machine's log.
    """

    def __init__(self, api: Api, pods: Pods, home: Path) -> None:
        self._here = HostLog(home)
        self._log = ClusterHostLog(api, pods.namespace)

    def isolated(self, tell: Callable[[str], None]) -> tuple[str, ...]:
        """Return the hosts on which nothing is placed; tell: takes what is amiss.

        Raises JobError: this machine's log cannot be read.
        """
        known = list(self._here.hosts().values())
        try:
            known += self._log.hosts().values()
        except JobError as error:
            tell(f"which hosts other machines have isolated is not known: {error}")
        return tuple(sorted({host.host for host in known if host.isolated}))

    def note(self, event: AnyHostEvent) -> None:
        """Take down what was learned of a host. Raises JobError: on this machine alone, if at all.

        Telling it twice does no harm.
        """
        try:
            self._log.append(event)
        except JobError as error:
            self._here.append(event)
            raise JobError(
                f"what happened on {event.host} is known to this machine alone: {error}"
            ) from error
