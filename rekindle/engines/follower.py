"""Follow a job to its end under the lease, and start the nodes that it requests.

The train flow and the command line use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rekindle import names
from rekindle.engines.base import MOST_REVIVALS, Engine
from rekindle.errors import JobError, LeaseHeldError, UsageError
from rekindle.job.spec import Endpoint
from rekindle.recovery.journal.journal import AnyEvent, NodeWanted, Progress


class JobFollower:
    """Steers one job. It replaces a failed coordinator, and asks the engine for missing nodes.

    `holder` names this process to others that want to steer the job. `see` takes each event, after
    the follower has acted on it. `say` takes a warning as text. `is_over` returns True if no
    coordinator shall replace a failed one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        holder: str,
        see: Callable[[AnyEvent], None],
        say: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._see = see
        self._say = say
        self._is_over = is_over
        self._held = False
        self._newest = 0  # the number of the newest event; Progress has none

    def follow(
        self,
        endpoint: Endpoint,
        since: int = 0,
        held: Callable[[bool], None] = lambda first: None,
    ) -> None:
        """Follow the events to the job's end, or until MOST_REVIVALS coordinators have failed.

        since: the number of the newest known event. held: called each time that this process takes
        the lease, with True the first time.

        Raises LeaseHeldError: another process steers the job. Raises JobError: a coordinator
        neither answers nor ends.
        """
        self._newest = max(self._newest, since)
        for revivals in range(MOST_REVIVALS + 1):
            try:
                self._steer(endpoint, held)
            except LeaseHeldError:
                raise
            except JobError as error:
                if self._is_over() or revivals == MOST_REVIVALS:
                    return
                self._say(f"{error}; a new coordinator replaces it")
            else:
                return
            endpoint = self.next_coordinator()

    def next_coordinator(self) -> Endpoint:
        """Start another coordinator, or find the old one if it was only slow.

        Raises JobError: the old one neither answers nor ends.
        """
        try:
            return self._engine.revive()
        except UsageError as error:  # the old one still has its port
            slow = self._engine.alive()
            if slow is None:
                raise JobError(f"the job's coordinator does not answer: {error}") from error
            return slow

    def learn(self, history: Iterable[AnyEvent]) -> None:
        """Pass events to the engine, which records facts about hosts.

        A failure does not stop training.
        """
        for event in history:
            try:
                self._engine.learn(event)
            except JobError as error:
                self._say(str(error))

    def bring(self, nodes: Iterable[int]) -> None:
        """Start an agent for each of these nodes, or spares.

        If no host is free, the job continues without the node, or fails after its own time limit.
        """
        for node in nodes:
            what = "a spare" if node == names.SPARE else f"node {node}"
            try:
                self._engine.replace(node)
            except JobError as error:
                self._say(f"Rekindle cannot replace {what}: {error}")

    def _steer(self, endpoint: Endpoint, held: Callable[[bool], None]) -> None:
        client = self._engine.client(endpoint)
        with client.steer(holder=self._holder, since=self._newest) as events:
            first, self._held = not self._held, True
            held(first)
            for event in events:
                self._newest = max(self._newest, event.seq)
                if not isinstance(event, Progress):
                    self.learn([event])
                if isinstance(event, NodeWanted):
                    self.bring([event.node])
                self._see(event)
