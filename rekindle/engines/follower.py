"""Follow a job to its end under the lease, and start the nodes that it requests.

The train flow and the command line use this module.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable

from rekindle import names
from rekindle.engines.base import MOST_REVIVALS, Engine
from rekindle.engines.client import ANSWER_S
from rekindle.errors import JobError, LeaseHeldError, UsageError
from rekindle.job.spec import Endpoint
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import AnyEvent, NodeWanted, Progress

_STEADY_S = 60.0  # a coordinator that has sent events for so long did not fail at its start
_MOST_PATIENCE = 32  # limits for a coordinator's answer: 10 s at first, at most 320 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


class JobFollower:
    """Steers one job. It replaces a failed coordinator, and asks the engine for missing nodes.

    `holder` names this process to others that want to steer the job. `see` takes each event, after
    the follower has acted on it. `say` takes a warning as text. `is_stopped` returns True
    if no coordinator shall replace a failed one, because a person stops the job.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        holder: str,
        see: Callable[[AnyEvent], None],
        say: Callable[[str], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._see = see
        self._say = say
        self._is_stopped = is_stopped
        self._token = uuid.uuid4().hex  # identifies this process to the coordinator
        self._held = False
        self._newest = 0  # the number of the newest event; Progress has none
        self._finished = 0  # steps of the job
        self._failures = 0  # coordinators that failed one after another
        self._pause_s = _FIRST_PAUSE_S  # before the next connection, after a broken stream

    def follow(
        self,
        endpoint: Endpoint,
        since: int = 0,
        held: Callable[[bool], None] = lambda first: None,
    ) -> None:
        """Follow the events to the job's end, or until MOST_REVIVALS coordinators have failed.

        A stream that breaks while the coordinator answers is no failure. A coordinator that does
        not answer is one, also if its process lives. The count of failures returns to 0 when the
        job finishes a step, and when a coordinator has served this process for _STEADY_S.

        since: the number of the newest known event. held: called each time that this process takes
        the lease, with True the first time.

        Raises LeaseHeldError: another process steers the job. Raises JobError: a failed coordinator
        does not end, or its address is not available.
        """
        self._newest = max(self._newest, since)
        while True:
            try:
                return self._steer(endpoint, held)
            except LeaseHeldError:
                raise
            except JobError as error:
                found = self._ask(error)
                if found is None:
                    if self._catch_up(endpoint.attempt):
                        return None
                    if self._is_stopped() or self._failures == MOST_REVIVALS:
                        return None
                    self._failures += 1
                    self._say(f"{error}; a new coordinator replaces it")
                    found = self.next_coordinator()
                endpoint = found

    def next_coordinator(self) -> Endpoint:
        """Start another coordinator. Raises JobError: that is not possible."""
        try:
            return self._engine.revive()
        except UsageError as error:  # another process took the port
            raise JobError(f"Rekindle cannot replace the job's coordinator: {error}") from error

    def _ask(self, error: JobError) -> Endpoint | None:
        """Return the coordinator's address if it answers; the stream of events has broken.

        This process, or the coordinator, may have been stopped for a while. So the broken stream
        alone decides nothing. A coordinator on a busy machine may also be slow, in particular while
        it starts. So each failure after another one doubles the limit.
        """
        found = self._engine.alive(limit_s=ANSWER_S * min(2**self._failures, _MOST_PATIENCE))
        if found is not None:
            self._say(f"{error}; the coordinator answers, and this process connects again")
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return found

    def _catch_up(self, attempt: int) -> bool:
        """If the attempt has ended, handle its last events, and return True.

        The coordinator ends after the job. This process may have been stopped at that time.
        """
        history = self._engine.history()
        # The failed coordinator may have kept its newest events in memory. The next one uses their
        # numbers for others.
        if history:
            self._newest = min(self._newest, history[-1].seq)
        if attempts.number(history, none=-1) < attempt or attempts.end_of(history) is None:
            return False
        for event in [event for event in history if event.seq > self._newest]:
            self._newest = event.seq
            self.learn([event])
            self._see(event)
        return True

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
        with client.steer(holder=self._holder, token=self._token, since=self._newest) as events:
            first, self._held = not self._held, True
            held(first)
            began = time.monotonic()
            for event in events:
                self._note(event, time.monotonic() - began)
                if not isinstance(event, Progress):
                    self.learn([event])
                if isinstance(event, NodeWanted):
                    self.bring([event.node])
                self._see(event)

    def _note(self, event: AnyEvent, served_s: float) -> None:
        if event.seq > self._newest:
            self._newest, self._pause_s = event.seq, _FIRST_PAUSE_S
        advances = isinstance(event, Progress) and event.finished > self._finished
        if isinstance(event, Progress) and advances:
            self._finished = event.finished
        if advances or served_s > _STEADY_S:
            self._failures = 0
