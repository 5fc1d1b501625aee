"""One figure of one rank, step by step: what it was, and whether it has risen. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import msgspec

SKIPPED = 3  # steps in which caches fill, and kernels are chosen
BASELINE = 20  # steps, as MindCluster's detection takes
# How many of the newest steps must agree, and for how large a change, in times of the least: a
# machine is busy with something else for some steps now and then.
WINDOWS = ((8, 4.0), (12, 2.0), (18, 1.0))
# Of the steps that must be nearer to what is now than to what was, and then the other way.
MOST = 0.75
FEW = 2.0  # standard errors, where it is asked whether something is another thing's cause
WIDE = 1.5  # times the spread of the steps: they may not vary each by itself
SAME = 0.03  # by which the halves of a baseline may differ: else it is not one, and begins later
_MAD = 1.4826  # of a normal distribution: its standard deviation, in median absolute deviations
_MEDIAN = 1.2533  # and the standard error of a median, in that of a mean


class Shift(msgspec.Struct, frozen=True):
    """A series has risen: by how much, from which step on, and what it was before."""

    height: float
    since: int
    before: float


class Series:
    """One figure of one rank: its baseline, and the newest steps."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._newest: deque[tuple[int, float]] = deque(maxlen=3 * WINDOWS[-1][0])
        self._skipped = 0
        self._spread = 0.0
        self.before: float | None = None  # the baseline's median, as soon as it is there
        self.most = 0.0  # how far the steps of the shortest window ever were from it

    def add(self, step: int, value: float) -> None:
        if self._skipped < SKIPPED:
            self._skipped += 1
        elif self.before is None:
            self._first.append(value)
            if len(self._first) == BASELINE:
                self._verify()
        else:
            self._newest.append((step, value))
            newest = [value for _, value in self._newest][-WINDOWS[0][0] :]
            if len(newest) == WINDOWS[0][0]:
                self.most = max(self.most, abs(statistics.median(newest) - self.before))

    def _verify(self) -> None:
        """Take what was first for what is usual, unless it has changed meanwhile."""
        half = BASELINE // 2
        early, late = statistics.median(self._first[:half]), statistics.median(self._first[half:])
        around = statistics.median(self._first)
        spread = _spread(self._first, around)
        if abs(early - late) > max(SAME, 2 * _MEDIAN * spread * math.sqrt(2 / half)):
            self._first = self._first[half:]
        else:
            self.before, self._spread = around, spread

    def shift(self, least: float, sure: float) -> Shift | None:
        """Return the rise that the newest steps agree on, if it is more than `least`."""
        if self.before is None:
            return None
        values = [value for _, value in self._newest]
        for window, times in WINDOWS:
            if len(values) < window:
                return None
            newest = values[-window:]
            now = statistics.median(newest)
            spread = max(_spread(newest, now), self._spread)
            error = _MEDIAN * spread * math.sqrt(1 / window + 1 / BASELINE)
            height = now - self.before
            middle = self.before + height / 2
            most = sum(value > middle for value in newest) >= MOST * window
            few = sum(value > middle for value in self._first) <= (1 - MOST) * BASELINE
            enough = max(times * least, sure * error, WIDE * spread)
            if height > enough and most and few:
                return Shift(height, self._since(self.before + height / 2), self.before)
        return None

    def rise(self, since: int) -> float:
        """Return by how much the steps from there on are above the baseline."""
        newest = [value for step, value in self._newest if step >= since]
        return (
            statistics.median(newest) - self.before if newest and self.before is not None else 0.0
        )

    def rose(self, since: int, by: float) -> bool:
        """Whether they are by so much above it, and that is no chance."""
        count = sum(step >= since for step, _ in self._newest)
        error = _MEDIAN * self._spread * math.sqrt(1 / max(count, 1) + 1 / BASELINE)
        return self.rise(since) > max(by, FEW * error)

    def _since(self, half: float) -> int:
        """Return the step from which on most values are above the middle."""
        best, total, since = -math.inf, 0.0, self._newest[-1][0]
        for step, value in reversed(self._newest):
            total += value - half
            if total >= best:
                best, since = total, step
        return since


def _spread(values: Sequence[float], around: float) -> float:
    """Return how far values lie around there: the larger of both sides, for delays have a tail."""
    above = [value - around for value in values if value >= around]
    below = [around - value for value in values if value <= around]
    return _MAD * max(statistics.median(above), statistics.median(below))
