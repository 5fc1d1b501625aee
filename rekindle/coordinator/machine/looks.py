"""The look at all ranks that is under way, to find out whether they hang."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.job_state import CancelTimer, JobState, Timer
from rekindle.protocol import agent as p

# Between two looks that found no hang. It doubles: an agent alone says seldom that ranks are late,
# a thousand of them do so all the time.
SOONEST_S, SELDOM_S = 1.0, 30.0


class HangInspection:
    """One look at all ranks. at: where the job was then, which may be over when all have answered.

    wanted: nodes that have not answered. blind: those that could not look. patient: they have more
    time than usual.
    """

    def __init__(self, serial: int, at: tuple[int, int], wanted: set[int]) -> None:
        self.serial = serial
        self.at = at
        self.wanted = wanted
        self.blind: set[int] = set()
        self.looks: list[p.RankInspection] = []
        self.patient = False


class InspectionBackoff(msgspec.Struct, frozen=True):
    """Time between looks that find nothing, as long as the job is where it was (`at`).

    known: ranks that had made no progress when they were looked at.
    """

    at: tuple[int, ...] = ()
    seconds: float = 0.0
    since: float = 0.0
    known: frozenset[int] = frozenset()

    def is_over(self, at: tuple[int, ...], rank: int, now: float) -> bool:
        """Whether to look because of this rank: it was not late before, or the pause is over."""
        return at != self.at or rank not in self.known or now >= self.since + self.seconds

    def begun(self, at: tuple[int, ...], rank: int, now: float) -> InspectionBackoff:
        """Return the pause after the look that begins now; after the first there is none."""
        if at != self.at:
            return InspectionBackoff(at, 0.0, now, frozenset({rank}))
        seconds = min(max(2 * self.seconds, SOONEST_S), SELDOM_S)
        return InspectionBackoff(at, seconds, now, self.known | {rank})


class Looks:
    """One look at a time.

    looking: the one under way. count: looks so far. pause: after the newest. suspect: the rank that
    a second look may blame.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.looking: HangInspection | None = None
        self.count = 0
        self.pause = InspectionBackoff()
        self.suspect: p.RankInspection | None = None

    def stop(self) -> None:
        """Forget the look under way, and the suspect."""
        self.looking = self.suspect = None
        self._job.do(CancelTimer(Timer.LOOK))
        self._job.do(CancelTimer(Timer.AGAIN))
