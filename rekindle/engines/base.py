"""Define the interface of an engine, which places the nodes of a job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rekindle.engines.client import ANSWER_S, JobClient
from rekindle.job.spec import Endpoint
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal.journal import AnyEvent

MOST_REVIVALS = 10  # coordinators that fail one after another, without a step between them


class Engine(Protocol):
    """Places one job. The processes that it starts outlive the process that called it."""

    def launch(self, *, attempt: int) -> Endpoint:
        """Start the coordinator, agents and spares; return the coordinator's address.

        Raises UsageError: the engine cannot start the job as described.
        """

    def alive(self, *, limit_s: float = ANSWER_S) -> Endpoint | None:
        """Return the address of the job's coordinator if it runs and answers within the limit."""

    def history(self) -> list[AnyEvent]:
        """Read all events of the job, of all its attempts; an empty list if there is no job.

        Raises JobError: the engine cannot read them.
        """

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return a client of the job's coordinator."""

    def watch(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Return a context in which the engine observes the nodes.

        `report` takes a health event of a node; it may raise JobError. `tell` takes a text for
        users.
        """

    def release(self) -> None:
        """Remove the remains of an ended job where it ran; its history stays readable.

        Raises JobError: the engine cannot remove something.
        """

    def replace(self, node: int) -> None:
        """Start an agent for this node rank, or one more spare (names.SPARE).

        A second call for a node does no harm: the engine starts no second agent while the first one
        is on its way, or the coordinator refuses it. Raises JobError: no host is free.
        """

    def learn(self, event: AnyEvent) -> None:
        """Record the facts about hosts in an event of the job's journal.

        After that the engine places nothing on an isolated host. A second call with the same event
        does no harm. Raises JobError: the engine cannot record it.
        """

    def revive(self) -> Endpoint:
        """Start another coordinator to replace one that failed; the agents connect to it.

        A failed coordinator that still lives ends first. Raises UsageError: its address is not
        available. Raises JobError: the failed one does not end.
        """
