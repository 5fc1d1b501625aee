"""What an engine is: it places the nodes of a job, and tells whether the job lives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rekindle.engines.client import JobClient
from rekindle.job.spec import Endpoint
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal.journal import AnyEvent

MOST_REVIVALS = 10  # coordinators that die one after the other have a cause that stays


class Engine(Protocol):
    """Places one job. Whatever it starts outlives the process that called it."""

    def launch(self, *, attempt: int) -> Endpoint:
        """Start the coordinator, an agent per node, the spares; return where the first listens.

        Raises UsageError: the job cannot be started as described.
        """

    def alive(self) -> Endpoint | None:
        """Return where the job's coordinator listens, if it lives and answers."""

    def history(self) -> list[AnyEvent]:
        """Read all that happened to the job, through all its attempts; nothing if there is no job.

        Raises JobError: it cannot be read.
        """

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return what talks to the job's coordinator."""

    def watch(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Look, meanwhile, at what becomes of the nodes.

        report: takes what is seen of a node; may raise JobError. tell: takes it in words.
        """

    def release(self) -> None:
        """Remove what an ended job has left where it ran; its history stays readable.

        Raises JobError: something cannot be removed.
        """

    def replace(self, node: int) -> None:
        """Bring an agent for this node rank, or one more spare (names.SPARE).

        Asking twice for a node does no harm: the second agent is refused. Raises JobError: no host
        is free.
        """

    def learn(self, event: AnyEvent) -> None:
        """Note what an event of the job's journal says about hosts.

        Nothing is placed any more where a host was isolated. Telling it twice does no harm. Raises
        JobError: it cannot be noted.
        """

    def revive(self) -> Endpoint:
        """Start another coordinator in the place of one that died; its agents come to it.

        Raises UsageError: its address cannot be had again.
        """
