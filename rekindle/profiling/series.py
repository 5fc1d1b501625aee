"""StepSeries of times: their level, their noise, and changes. Pure."""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

MEDIAN = 1.2533  # the standard error of a median, in that of a mean
LEAST = 8  # values that tell anything
MOST_MEMORY = 0.98  # no more is told from so few steps
_MAD = 1.4826  # of a normal distribution: its standard deviation, in median absolute deviations
_FAR = 4  # values on
_OUTLIER = 3.0  # times the spread: what is farther out counts as that


def spread_of(values: Sequence[float]) -> float:
    """Return how far values lie around their median: the larger of both sides, for delays have a
    tail."""
    around = statistics.median(values)
    above = [value - around for value in values if value >= around]
    below = [around - value for value in values if value <= around]
    return _MAD * max(statistics.median(above), statistics.median(below))


class Sample(msgspec.Struct, frozen=True):
    """What so many values show of how they vary.

    near, far: how much of what it is off by each shares with the next one, and with the fourth one
    from there; spread: among each other.
    """

    near: float = 0.0
    far: float = 0.0
    spread: float = 0.0
    count: int = 0


class Noise(msgspec.Struct, frozen=True):
    """How a series varies by itself, as far as that is no chance.

    share: of it that the next value has as well, and of that the share `memory` the one after it,
    and so on. spread: in the long run.
    """

    share: float = 0.0
    memory: float = 0.0
    spread: float = 0.0

    def swing(self, count: int) -> float:
        """Return the variance of a mean of so many values, in that of one of them."""
        rest = 1 - self.memory
        lasting = self.memory * (1 - self.memory ** (count - 1))
        of_all = (lasting / rest) - self._weighted(count) / count if self.memory else 0.0
        factor = self.share / self.memory if self.memory else 0.0
        return (1 + 2 * factor * of_all) / count

    def _weighted(self, count: int) -> float:
        memory, last = self.memory, count - 1
        return (
            memory
            * (1 - (last + 1) * memory**last + last * memory ** (last + 1))
            / (1 - memory) ** 2
        )

    def in_the_long_run(self, spread: float, count: int) -> float:
        """Return the spread of values of which so many have this one among each other.

        Those that take after each other differ less, as long as they are few.
        """
        return spread * math.sqrt((1 - 1 / count) / (1 - self.swing(count)))


def sample_of(values: Sequence[float]) -> Sample:
    """Return how values vary. What is always too small in short series is put right."""
    count = len(values)
    if count < LEAST:
        return Sample()
    around, spread = statistics.median(values), spread_of(values)
    far = _OUTLIER * spread
    off = [min(max(value - around, -far), far) for value in values]
    mean = math.fsum(off) / count
    off = [each - mean for each in off]
    square = math.fsum(map(operator.mul, off, off))
    shared = [
        (count * math.fsum(map(operator.mul, off, off[lag:])) / square + 1) / (count - 4)
        for lag in (1, _FAR)
        if square
    ]
    near, distant = shared or (0.0, 0.0)
    return Sample(near, distant, spread, count)


def usual_noise(samples: Iterable[Sample]) -> Noise:
    """Return what many series have in common."""
    known = [each for each in samples if each.count]
    if not known:
        return Noise()
    chance = MEDIAN / math.sqrt(sum(each.count for each in known))
    near = statistics.median(each.near for each in known) - chance
    far = statistics.median(each.far for each in known) - chance
    noise = _noise(near, far)
    long_run = (noise.in_the_long_run(each.spread, each.count) for each in known)
    return msgspec.structs.replace(noise, spread=statistics.median(long_run))


def own_noise(sample: Sample) -> Noise:
    """Return what one series surely has: of one alone that is little."""
    near = sample.near - 2 / math.sqrt(max(sample.count, 1))
    return _noise(near, 0.0)


def _noise(near: float, far: float) -> Noise:
    near = min(max(near, 0.0), MOST_MEMORY)
    if far <= near**_FAR or not near:
        return Noise(near, near)
    # A part may be of each value alone, and the rest last the longer.
    memory = min((far / near) ** (1 / (_FAR - 1)), MOST_MEMORY)
    return Noise(min(near, memory), memory)


SKIPPED = 3  # steps in which caches fill, and kernels are chosen
BASELINE = 20  # steps, as MindCluster's detection takes
# How many of the newest steps must agree, for how large a change, in times of the least, and of how
# much steps vary (they may not vary each by itself): a machine is busy with something else for some
# steps now and then. Where ranks take turns on too few cores only many of them tell anything.
WINDOWS = ((8, 4.0, 1.5), (12, 2.0, 1.5), (18, 1.0, 1.5), (36, 1.0, 1.0))
_SHORTEST, _BLOCK = 8, 18
LASTING = 2 * _BLOCK  # steps after which what blames no node is the usual
KEPT = 2 * LASTING
LOOK_BACK = 6  # blocks of steps in which moves are remembered
# Of the steps that must be nearer to what is now than to what was, and then the other way.
MOST = 0.75
APART = 1.5  # times what others have moved by themselves
FEW = 1.5  # standard errors, where it is asked whether something is another thing's cause
MANY = 3.0  # the same, to take back what was told
WIDE = 1.5  # times the spread of a baseline's steps, likewise
SAME = 0.03  # by which the halves of a baseline may differ: else it is not one
LEAST_FALL = math.log(1.06)
NONE = Noise()


class Shift(msgspec.Struct, frozen=True):
    """A series has risen: by how much, from which step on, and what it was before."""

    height: float
    since: int
    before: float


class StepSeries:
    """One figure of one rank: its baseline, and the newest steps."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []
        self._newest: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._skipped = 0
        self._spread = 0.0
        self._moves: deque[float] = deque(maxlen=LOOK_BACK)  # the farthest of each block
        self._steps = 0  # of the newest block
        self.move = 0.0  # how far the steps of the shortest window are from the baseline
        self.before: float | None = None  # the baseline's median, as soon as it is there
        self.began = 0  # the step that the baseline begins with, if an earlier one was given up

    def add(self, step: int, value: float) -> None:
        """Take a step; those of a baseline count when it is settled."""
        if self._skipped < SKIPPED:
            self._skipped += 1
        elif self.before is None:
            self._first.append((step, value))
        else:
            self._newest.append((step, value))
            self._remember(self.before)

    def _remember(self, before: float) -> None:
        if len(self._newest) < _SHORTEST:
            return
        if self._steps % _BLOCK == 0:
            self._moves.append(0.0)
        self._steps += 1
        newest = [self._newest[index][1] for index in range(-_SHORTEST, 0)]
        self.move = abs(statistics.median(newest) - before)
        self._moves[-1] = max(self._moves[-1], self.move)

    @property
    def most(self) -> float:
        """How far they were at most, some time ago or now."""
        return max(self._moves, default=0.0)

    def lasting_move(self) -> float:
        """Return how far the steps of two blocks are from the baseline."""
        if self.before is None or not self._newest:
            return 0.0
        newest = [value for _, value in self._newest][-LASTING:]
        return abs(statistics.median(newest) - self.before)

    @property
    def rise_of_halves(self) -> float | None:
        """By how much the later half of a baseline that is to be settled is above the earlier."""
        if self.before is not None or len(self._first) < BASELINE:
            return None
        values = [value for _, value in self._first]
        half = BASELINE // 2
        return statistics.median(values[half:]) - statistics.median(values[:half])

    def settle(self, *, alone: bool = True) -> None:
        """Take what was first for what is usual, unless it has changed meanwhile.

        Who has risen alone is measured by what it was at first. Otherwise machines have become
        warm, and only what was later counts.
        """
        rise = self.rise_of_halves
        if rise is None:
            return
        half = BASELINE // 2
        values = [value for _, value in self._first]
        early, later = self._first[:half], self._first[half:]
        spreads = spread_of(values[:half]), spread_of(values[half:])
        if abs(rise) <= max(SAME, 2 * MEDIAN * max(spreads) * math.sqrt(2 / half)):
            self.before, self._spread = statistics.median(values), spread_of(values)
        elif alone and rise > WIDE * spreads[0]:
            self._first, self._spread = early, spreads[0]
            self.before = statistics.median(values[:half])
            self._newest.extend(later)
        else:
            self._first = later

    def settle_anew(self) -> None:
        """Take what has been for long for what is usual."""
        self._first = list(self._newest)[-BASELINE:]
        self._newest.clear()
        values = [value for _, value in self._first]
        self.before, self._spread = statistics.median(values), spread_of(values)
        self.began = self._first[0][0]
        self._moves.clear()
        self._steps, self.move = 0, 0.0

    def shift(self, least: float, sure: float, noise: Noise = NONE) -> Shift | None:
        """Return the rise that the newest steps agree on, if it is more than `least`.

        noise: what the series has at least, besides what these few steps show of it.
        """
        if self.before is None:
            return None
        values = [value for _, value in self._newest]
        for window, times, wide in WINDOWS:
            if len(values) < window:
                return None
            newest = values[-window:]
            now = statistics.median(newest)
            height = now - self.before
            if height <= times * least:
                continue
            spread = spread_of(newest)
            middle = self.before + height / 2
            most = sum(value > middle for value in newest) >= MOST * window
            few = sum(value > middle for _, value in self._first) <= (1 - MOST) * len(self._first)
            # A change within the baseline is no noise, if there is so much less of it now.
            usual = min(self._spread, 2 * spread) if spread else self._spread
            error = self._error(window, spread, usual, noise)
            enough = max(sure * error, wide * max(spread, usual))
            if height > enough and most and few:
                return Shift(height, self._since(middle), self.before)
        return None

    def holds(self, shift: Shift) -> bool:
        """Whether a rise that was seen is still there: steps are nearer to it than to what was.

        Some odd steps prove no end of it, no more than they would prove its begin.
        """
        newest = [value for _, value in self._newest][-LASTING:]
        middle = shift.before + shift.height / 2
        return self.before == shift.before and statistics.median(newest) > middle

    def _error(self, window: int, spread: float, usual: float, noise: Noise) -> float:
        """Return how far the median of so many steps is off the baseline by chance.

        spread, usual: of them, and of those that the baseline is of.
        """
        steps = len(self._first)
        if not noise.spread:  # these few steps tell it, which differ the less the more they share
            spread = noise.in_the_long_run(spread, window)
            usual = noise.in_the_long_run(usual, steps)
        spread = max(spread, usual, noise.spread)
        return MEDIAN * spread * math.sqrt(noise.swing(window) + noise.swing(steps))

    def has_fallen(self, noise: Noise = NONE) -> bool:
        """Whether it has been well below its baseline for long."""
        if self.before is None or len(self._newest) < LASTING:
            return False
        values = [value for _, value in self._newest][-LASTING:]
        height = self.before - statistics.median(values)
        if height <= LEAST_FALL:
            return False
        middle = self.before - height / 2
        most = sum(value < middle for value in values) >= MOST * LASTING
        # The baseline may be of both, of what was and of what is.
        error = self._error(LASTING, spread_of(values), 0.0, noise)
        return most and height > FEW * error

    def lasts(self, shift: Shift) -> bool:
        """Whether a rise has been there for as long."""
        return sum(step >= shift.since for step, _ in self._newest) >= LASTING

    def sample(self, until: int | None = None) -> Sample:
        """Return how its steps vary. until: a step from which on it is another one."""
        newest = list(self._newest)
        newest = [n for n in newest if n[0] < until] if until is not None else newest[:-_BLOCK]
        return sample_of([value for _, value in (*self._first, *newest)])

    def level(self) -> float:
        """Return the median of the newest steps, or of the baseline until there are enough."""
        if len(self._newest) < _BLOCK:
            return self.before or 0.0
        return statistics.median([value for _, value in self._newest][-LASTING:])

    def is_above(self, least: float) -> bool:
        """Whether it was above that from the baseline on, and is: both are no chance."""
        newest = [value for _, value in self._newest][-LASTING:]
        both = [[value for _, value in self._first]]
        both += [newest] if len(newest) >= _BLOCK else []
        return all(
            statistics.median(values) - FEW * MEDIAN * spread_of(values) / math.sqrt(len(values))
            > least
            for values in both
        )

    def rise(self, since: int) -> float:
        """Return by how much the steps from there on are above the baseline."""
        newest = [value for step, value in self._newest if step >= since]
        return (
            statistics.median(newest) - self.before if newest and self.before is not None else 0.0
        )

    def rise_now(self) -> float:
        """Return by how much the steps of a block are above the baseline."""
        if self.before is None or not self._newest:
            return 0.0
        return statistics.median([value for _, value in self._newest][-_BLOCK:]) - self.before

    def _since(self, half: float) -> int:
        """Return the step from which on most values are above the middle."""
        best, total, since = -math.inf, 0.0, self._newest[-1][0]
        for step, value in reversed(self._newest):
            total += value - half
            if total >= best:
                best, since = total, step
        return since


class Level:
    """A figure of all, which may change for good at any time: what it was just before counts."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def add(self, step: int, value: float) -> None:
        self._newest.append((step, value))

    def rose(self, since: int, by: float, few: float = FEW) -> bool:
        """Whether it has risen by so much with this step, and that is no chance."""
        before = [value for step, value in self._newest if step < since]
        after = [value for step, value in self._newest if step >= since]
        if len(before) < _SHORTEST or not after:
            return False
        error = MEDIAN * spread_of(before) * math.sqrt(1 / len(before) + 1 / len(after))
        rise = statistics.median(after) - statistics.median(before)
        return rise > max(by, few * error)


def settle(series: Mapping[Any, StepSeries], which: Iterable[Any]) -> None:
    """Settle the baselines of those that have done the steps for it, beside each other."""
    rises = {key: rise for key in which if (rise := series[key].rise_of_halves) is not None}
    moves = sorted(map(abs, rises.values()))
    for key, rise in rises.items():
        others = len(moves) - 1
        # It is one of them itself: a quarter of the others is there or one further on.
        quarter = others // 4 + (abs(rise) <= moves[others // 4])
        alone = others < 2 or rise > APART * moves[quarter]
        series[key].settle(alone=alone)
