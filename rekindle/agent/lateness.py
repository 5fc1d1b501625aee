"""Which ranks are late, and how long a rank may take for its work before it hangs. Pure.

Time is counted in looks. A watcher that was itself held up (a suspended laptop, a frozen container,
a machine without air) has seen nothing of the time that passed, and does not count it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.agent.process_activity import Activity
from rekindle.protocol.heartbeat_page import BUSY_S, PageReading, RankActivity

# What the longest so far is multiplied with. A hang is to be decided within three times the longest
# step, and to look at all ranks takes a moment of that.
FACTOR = 2.5
# With fewer known, a step may well be ten times as long as the longest so far. Of 32 that vary by
# ten, evenly on a logarithmic scale, all are below 1/2.5 of the greatest once in 10 million.
ENOUGH = 32
FACTOR_OF_FEW = 10.0
UNKNOWN_S = 60.0  # for what was never seen to end, in a process that computes nothing

# What has this long at the least even if it was short so far; all else has the policy's time.
_LEAST_S = {
    RankActivity.CHECKPOINT: BUSY_S,
    RankActivity.COMPILE: BUSY_S,
    RankActivity.EVALUATE: UNKNOWN_S,
}
# What may take long the first time without computing here: on a device, or on a disk.
_UNKNOWN_S = {
    RankActivity.CHECKPOINT: BUSY_S,
    RankActivity.COMPILE: BUSY_S,
    RankActivity.EVALUATE: BUSY_S,
}


class Learned:
    """How long one thing has taken so far."""

    def __init__(self) -> None:
        self.times = 0
        self.longest_s = 0.0

    def note(self, seconds: float, times: int = 1) -> None:
        """It was done so often, and took no longer than this."""
        self.times += times
        self.longest_s = max(self.longest_s, seconds)


def limit_s(doing: RankActivity, learned: Learned, *, least_s: float, busy: bool) -> float:
    """Return after how many seconds at one thing a rank is late with it.

    least_s: the policy's `hang_timeout_s`. busy: its processes compute, or wait for a disk. In a
    step that is no excuse, for whoever is stuck in a loop computes too.
    """
    least_s = max(least_s, _LEAST_S.get(doing, 0.0))
    if busy and doing is not RankActivity.STEP:
        least_s = max(least_s, BUSY_S)
    if not learned.times:
        return max(least_s, _UNKNOWN_S.get(doing, UNKNOWN_S))
    factor = FACTOR if learned.times >= ENOUGH else FACTOR_OF_FEW
    return max(least_s, factor * learned.longest_s)


LOOK_S = 0.25
LONGEST_LOOK_S = 1.0  # what one look counts at most
_UNWATCHED = (RankActivity.OUTSIDE, RankActivity.MEETING)
_STARTED = PageReading(0, RankActivity.OUTSIDE, 0)


class LatenessTracker:
    """What was seen of the ranks' heartbeat pages. least_s: see `limit_s`."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._watched_s = 0.0  # time that counts, so far
        self._last: float | None = None
        self._seen: dict[
            int, tuple[PageReading, float]
        ] = {}  # what each is at, and when that was new
        self._learned = {doing: Learned() for doing in RankActivity}

    def look(self, marks: Mapping[int, PageReading], now: float) -> list[int]:
        """Take in what the pages show at `now` (seconds); return the ranks that are late.

        Ranks that are not among the marks are forgotten.
        """
        passed = 0.0 if self._last is None else min(now - self._last, LONGEST_LOOK_S)
        self._last = now
        self._watched_s += passed
        for rank in self._seen.keys() - marks.keys():
            del self._seen[rank]
        for rank, mark in marks.items():
            self._see(rank, mark, passed)
        return [rank for rank in marks if self.elapsed_s(rank) > self.limit_s(rank, busy=False)]

    def _see(self, rank: int, mark: PageReading, passed: float) -> None:
        # One that was not there at the last look has been started since.
        before, since = self._seen.get(rank, (_STARTED, self._watched_s - passed))
        if mark == before and rank in self._seen:
            return
        self._seen[rank] = mark, self._watched_s
        met = mark.meetings != before.meetings
        begun = met or before.doing is RankActivity.MEETING
        if begun and mark.doing is RankActivity.STEP and 0.0 < passed < LONGEST_LOOK_S:
            self._learned[RankActivity.FIRST].note(passed)  # it came and went between two looks
        if met or mark.doing in _UNWATCHED:
            return  # what was broken off tells nothing about how long it takes
        self._learned[before.doing].note(self._watched_s - since)
        unseen = (
            mark.finished
            - before.finished
            - (before.doing in (RankActivity.FIRST, RankActivity.STEP))
        )
        if unseen > 0:
            for doing in (RankActivity.STEP, RankActivity.BETWEEN):
                self._learned[doing].note(passed, unseen)

    def elapsed_s(self, rank: int) -> float:
        """Return how long the rank has been at what it is at, as far as that was seen."""
        if rank not in self._seen:
            return 0.0
        return self._watched_s - self._seen[rank][1]

    def limit_s(self, rank: int, *, busy: bool) -> float:
        """Return how long it may be; without end for what is not watched."""
        doing = self._seen[rank][0].doing if rank in self._seen else RankActivity.OUTSIDE
        if doing in _UNWATCHED:
            return float("inf")
        learned = self._learned[doing]
        if doing is RankActivity.STEP and not learned.times:
            learned = self._learned[RankActivity.FIRST]  # it takes no less than another
        return limit_s(doing, learned, least_s=self._least_s, busy=busy)


class IdleTracker:
    """For how long the processes of ranks outside of a Session have done nothing.

    Ranks are known by their pids: a process that was started anew has not rested yet.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Activity] = {}
        self._rested_s: dict[int, float] = {}
        self._devices: dict[int, int] = {}

    def still(self, activities: Mapping[int, Activity], seconds: float) -> list[int]:
        """Return the pids whose processes have done nothing in so many seconds."""
        seen = self._seen
        return [p for p, now in activities.items() if p in seen and now.rests(seen[p], seconds)]

    def look(
        self,
        activities: Mapping[int, Activity],
        seconds: float,
        devices: Mapping[int, int] | None = None,
    ) -> None:
        """Take in what they have done in so many seconds; all others are forgotten.

        devices: of the ranks that are still, how busy the device is, in percent, where it says so.
        One that computes by itself is not busy by the same measure each time; one that is stuck is,
        and so is one that waits. ModelArts tells them apart so, too.
        """
        use = devices or {}
        moved = {p for p in use.keys() & self._devices if abs(use[p] - self._devices[p]) > 1}
        still = set(self.still(activities, seconds)) - moved
        self._rested_s = {pid: self.rested_s(pid) + seconds for pid in still}
        self._seen, self._devices = dict(activities), dict(use)

    def overlook(self, pid: int, activity: Activity) -> None:
        """What the rank has done up to now was our doing."""
        if pid in self._seen:
            self._seen[pid] = activity

    def rested_s(self, pid: int) -> float:
        """Return for how long the rank has done nothing."""
        return self._rested_s.get(pid, 0.0)
