"""Decides which ranks are late, and how long a rank may take for its work before it hangs. Pure.

Time is counted in looks. A watcher that was itself stopped (a suspended laptop, a frozen container,
an overloaded machine) has not observed that time, and does not count it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.agent.process_activity import Activity
from rekindle.protocol.heartbeat_page import BUSY_S, PageReading, RankActivity

# The factor for the longest duration so far. A decision about a hang must come within three times
# the longest step, and the inspection of all ranks takes a part of that.
FACTOR = 2.5
# With fewer known durations, a step may take ten times as long as the longest so far. Among 32 that
# vary by ten, evenly on a logarithmic scale, all are below 1/2.5 of the greatest once in 10
# million.
ENOUGH = 32
FACTOR_OF_FEW = 10.0
UNKNOWN_S = 60.0  # for an activity without a known duration, in a process that does not compute

# The least limits, even for activities that were short so far; the others have a policy's time.
_LEAST_S = {
    RankActivity.CHECKPOINT: BUSY_S,
    RankActivity.COMPILE: BUSY_S,
    RankActivity.EVALUATE: UNKNOWN_S,
}
# Activities whose first run may be long without computing here: on a device, or on a disk.
_UNKNOWN_S = {
    RankActivity.CHECKPOINT: BUSY_S,
    RankActivity.COMPILE: BUSY_S,
    RankActivity.EVALUATE: BUSY_S,
}

LOOK_S = 0.25
LONGEST_LOOK_S = 1.0  # the most that one look counts
_UNWATCHED = (RankActivity.OUTSIDE, RankActivity.MEETING)
_STARTED = PageReading(0, RankActivity.OUTSIDE, 0)


class Learned:
    """The durations of one activity so far."""

    def __init__(self) -> None:
        self.times = 0
        self.longest_s = 0.0

    def note(self, seconds: float, times: int = 1) -> None:
        """Record that it ran this often, and took no longer than this."""
        self.times += times
        self.longest_s = max(self.longest_s, seconds)


def limit_s(doing: RankActivity, learned: Learned, *, least_s: float, busy: bool) -> float:
    """Return after how many seconds of one activity a rank is late.

    least_s: the policy's time for it. busy: its processes compute, or wait for a disk. In a step
    this does not extend the limit, because a rank in an endless loop computes as well.
    """
    least_s = max(least_s, _LEAST_S.get(doing, 0.0))
    if busy and doing is not RankActivity.STEP:
        least_s = max(least_s, BUSY_S)
    if not learned.times:
        return max(least_s, _UNKNOWN_S.get(doing, UNKNOWN_S))
    factor = FACTOR if learned.times >= ENOUGH else FACTOR_OF_FEW
    return max(least_s, factor * learned.longest_s)


class LatenessTracker:
    """The observations of the ranks' heartbeat pages.

    least_s: the policy's `hang_timeout_s`. between_s: its `between_timeout_s`.
    """

    def __init__(self, least_s: float, between_s: float) -> None:
        self._least_s = dict.fromkeys(RankActivity, least_s)
        self._least_s[RankActivity.BETWEEN] = max(least_s, between_s)
        self._watched_s = 0.0  # the time that counts, so far
        self._last: float | None = None
        self._marks: dict[
            int, tuple[PageReading, float]
        ] = {}  # the activity of each, and its start
        self._learned = {doing: Learned() for doing in RankActivity}

    def look(self, marks: Mapping[int, PageReading], now: float) -> list[int]:
        """Record the pages at `now` (seconds); return the ranks that are late.

        It drops ranks without a mark.
        """
        elapsed_s = 0.0 if self._last is None else min(now - self._last, LONGEST_LOOK_S)
        self._last = now
        self._watched_s += elapsed_s
        for rank in self._marks.keys() - marks.keys():
            del self._marks[rank]
        for rank, mark in marks.items():
            self._see(rank, mark, elapsed_s)
        return [rank for rank in marks if self.elapsed_s(rank) > self.limit_s(rank, busy=False)]

    def _see(self, rank: int, mark: PageReading, elapsed_s: float) -> None:
        # A rank that is new at this look has started since the last one.
        before, since = self._marks.get(rank, (_STARTED, self._watched_s - elapsed_s))
        if mark == before and rank in self._marks:
            return
        self._marks[rank] = mark, self._watched_s
        met = mark.meetings != before.meetings
        begun = met or before.doing is RankActivity.MEETING
        if begun and mark.doing is RankActivity.STEP and 0.0 < elapsed_s < LONGEST_LOOK_S:
            # It began and ended between two looks.
            self._learned[RankActivity.FIRST].note(elapsed_s)
        if met or mark.doing in _UNWATCHED:
            return  # an interrupted activity does not show its duration
        self._learned[before.doing].note(self._watched_s - since)
        unseen = (
            mark.finished
            - before.finished
            - (before.doing in (RankActivity.FIRST, RankActivity.STEP))
        )
        if unseen > 0:
            for doing in (RankActivity.STEP, RankActivity.BETWEEN):
                self._learned[doing].note(elapsed_s, unseen)

    def elapsed_s(self, rank: int) -> float:
        """Return the seconds of the rank's current activity, as far as they were observed."""
        if rank not in self._marks:
            return 0.0
        return self._watched_s - self._marks[rank][1]

    def limit_s(self, rank: int, *, busy: bool) -> float:
        """Return the limit of the current activity in seconds; infinite if it is not watched."""
        doing = self._marks[rank][0].doing if rank in self._marks else RankActivity.OUTSIDE
        if doing in _UNWATCHED:
            return float("inf")
        learned = self._learned[doing]
        if doing is RankActivity.STEP and not learned.times:
            learned = self._learned[RankActivity.FIRST]  # a step is not longer than the first one
        return limit_s(doing, learned, least_s=self._least_s[doing], busy=busy)


class IdleTracker:
    """Measures for how long the processes of ranks outside of a Session are idle.

    It knows ranks by their pids, so a restarted process has not been idle yet.
    """

    def __init__(self) -> None:
        self._activities: dict[int, Activity] = {}
        self._rested_s: dict[int, float] = {}
        self._devices: dict[int, int] = {}

    def still(self, activities: Mapping[int, Activity], seconds: float) -> list[int]:
        """Return the pids whose processes have been idle for the last `seconds`."""
        before = self._activities
        return [p for p, now in activities.items() if p in before and now.rests(before[p], seconds)]

    def look(
        self,
        activities: Mapping[int, Activity],
        seconds: float,
        devices: Mapping[int, int] | None = None,
    ) -> None:
        """Record their activity in the last `seconds`; drop all other pids.

        devices: the utilization of the device of each idle rank, in percent, if its tool reports
        it. The utilization of a computing device varies. That of a hanging or waiting one is
        constant. ModelArts distinguishes them in the same way.
        """
        use = devices or {}
        moved = {p for p in use.keys() & self._devices if abs(use[p] - self._devices[p]) > 1}
        still = set(self.still(activities, seconds)) - moved
        self._rested_s = {pid: self.rested_s(pid) + seconds for pid in still}
        self._activities, self._devices = dict(activities), dict(use)

    def overlook(self, pid: int, activity: Activity) -> None:
        """Ignore the rank's activity up to now, because the agent caused it."""
        if pid in self._activities:
            self._activities[pid] = activity

    def rested_s(self, pid: int) -> float:
        """Return the seconds for which the rank has been idle."""
        return self._rested_s.get(pid, 0.0)
