"""The inspection of all ranks that is under way, to find out whether they hang."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.job_state import CancelTimer, JobState, Timer
from rekindle.protocol import agent as p

# Shortest and longest pause after an inspection that found no hang. The pause doubles: one agent
# rarely reports late ranks, but among a thousand agents, one always does.
SOONEST_S, SELDOM_S = 1.0, 30.0


class HangInspection:
    """One inspection of all ranks.

    at: generation and restarts at its start, which may have changed when all nodes have answered.

    wanted: nodes that have not answered. blind: nodes that could not inspect. patient: whether
    nodes have more time than usual.
    """

    def __init__(self, serial: int, at: tuple[int, int], wanted: set[int]) -> None:
        self.serial = serial
        self.at = at
        self.wanted = wanted
        self.blind: set[int] = set()
        self.looks: list[p.RankInspection] = []
        self.patient = False


class InspectionBackoff(msgspec.Struct, frozen=True):
    """The pause after inspections that find no hang, while the job makes no progress (`at`).

    known: ranks that had made no progress at an inspection.
    """

    at: tuple[int, ...] = ()
    seconds: float = 0.0
    since: float = 0.0
    known: frozenset[int] = frozenset()

    def is_over(self, at: tuple[int, ...], rank: int, now: float) -> bool:
        """Return whether to inspect because of this rank: it is newly late, or the pause ended."""
        return at != self.at or rank not in self.known or now >= self.since + self.seconds

    def begun(self, at: tuple[int, ...], rank: int, now: float) -> InspectionBackoff:
        """Return the pause after the inspection that begins now. The first one has no pause."""
        if at != self.at:
            return InspectionBackoff(at, 0.0, now, frozenset({rank}))
        seconds = min(max(2 * self.seconds, SOONEST_S), SELDOM_S)
        return InspectionBackoff(at, seconds, now, self.known | {rank})


class Looks:
    """At most one inspection at a time.

    looking: the one under way. count: inspections so far. pause: the pause after the newest.

    suspect: the rank that a second inspection may confirm as the cause.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.looking: HangInspection | None = None
        self.count = 0
        self.pause = InspectionBackoff()
        self.suspect: p.RankInspection | None = None

    def stop(self) -> None:
        """Drop the inspection under way, and the suspect."""
        self.looking = self.suspect = None
        self._job.do(CancelTimer(Timer.LOOK))
        self._job.do(CancelTimer(Timer.AGAIN))
