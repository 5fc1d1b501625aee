"""Pauses between two steps: the parts that need one, and their work while all ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import JobState, Phase, Send
from rekindle.coordinator.machine.roster import Status
from rekindle.protocol import agent as p


class PauseUser(Protocol):
    """A part that works while no rank trains.

    Its work does not need a pause of its own: after a fault all ranks wait as well.
    """

    @property
    def pause_cause(self) -> p.Cause | None:
        """Return why the part needs a pause now; None: it does not need one."""

    def on_paused(self, now: float) -> None:
        """Act while the first rank pauses, before the generation ends."""

    def work_in_pause(self) -> bool:
        """Work while every rank waits. Return whether the next generation must wait for it."""


class Pauses:
    """Pauses the world between two steps when a part needs it, at most once in a generation.

    users: the parts, in the order in which they work.
    """

    def __init__(self, job: JobState, generations: Generations, users: Sequence[PauseUser]) -> None:
        self._job = job
        self._generations = generations
        self._users = users
        self._roster = job.roster
        self._requested = 0  # the newest generation with a request

    def request(self) -> None:
        """Request a pause if a part needs one, and every rank has finished a step and trains."""
        job = self._job
        steady = job.phase is Phase.TRAINING and self._roster.all_stepped
        if self._requested == job.generation or not steady:
            return
        if not self._roster.all_are(Status.TRAINING) or self._cause is None:
            return
        self._requested = job.generation
        first = self._roster.world[0]
        pause = p.PauseRequest(rank=first.rank, generation=job.generation)
        job.do(Send(self._roster.nodes[first.node].connection, pause))

    def on_paused(self, node: int, message: p.Paused, now: float) -> None:
        """End the generation, because its first rank stands between two steps."""
        if message.generation != self._job.generation or self._job.phase is not Phase.TRAINING:
            return
        rank = self._roster.ranks[message.rank]
        rank.finished = max(rank.finished, message.finished)
        cause = self._cause
        for user in self._users:
            user.on_paused(now)
        self._generations.declare_over(cause)

    @property
    def _cause(self) -> p.Cause | None:
        causes = (user.pause_cause for user in self._users)
        return next((cause for cause in causes if cause is not None), None)

    def work(self) -> bool:
        """Let the parts work while every rank waits. Return whether one is not ready yet."""
        return any(user.work_in_pause() for user in self._users)
