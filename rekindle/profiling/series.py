"""Model series of step times: their level, their noise, and changes. Pure."""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

MEDIAN = 1.2533  # the standard error of a median, relative to that of a mean
LEAST = 8  # fewer values give no sample
MOST_MEMORY = 0.98  # so few steps cannot show more
_MAD = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
_FAR = 4  # the second lag, in values
_OUTLIER = 3.0  # times the spread; values farther from the median are clipped
SKIPPED = 3  # steps in which caches fill and the framework selects kernels
BASELINE = 20  # steps, as in MindCluster's detection
# Each row has the number of newest steps that must agree. Then follows the size of the change, in
# multiples of the least change and of the spread (steps may be correlated). A machine is sometimes
# busy with other work for a few steps. If ranks share too few cores, only many steps give
# information.
WINDOWS = ((8, 4.0, 1.5), (12, 2.0, 1.5), (18, 1.0, 1.5), (36, 1.0, 1.0))
_SHORTEST, _BLOCK = 8, 18
LASTING = 2 * _BLOCK  # after this number of steps, a rise without a slow node becomes the baseline
KEPT = 2 * LASTING
LOOK_BACK = 6  # blocks of steps whose moves count
# This share of the new steps must be nearer to the new level, and this share of the baseline nearer
# to the old level.
MOST = 0.75
APART = 1.5  # times the usual moves of other ranks
FEW = 1.5  # standard errors, to decide whether one change causes another
MANY = 3.0  # standard errors, to withdraw a finding
WIDE = 1.5  # times the spread of a baseline's steps, to split the baseline
SAME = 0.03  # the halves of a baseline may differ by at most this
LEAST_FALL = math.log(1.06)


def spread_of(values: Sequence[float]) -> float:
    """Return the spread of values around their median.

    The result is the larger of both sides, because delays have a long tail.
    """
    around = statistics.median(values)
    above = [value - around for value in values if value >= around]
    below = [around - value for value in values if value <= around]
    return _MAD * max(statistics.median(above), statistics.median(below))


class Sample(msgspec.Struct, frozen=True):
    """Describe the variation of a number of values.

    `near` and `far` are the autocorrelations at lag 1 and lag 4. `spread` is the spread of the
    values.
    """

    near: float = 0.0
    far: float = 0.0
    spread: float = 0.0
    count: int = 0


class Noise(msgspec.Struct, frozen=True):
    """Describe the systematic noise of a series.

    `share` is the autocorrelation at lag 1. Each further lag multiplies it by `memory`. `spread` is
    the spread in the long run.
    """

    share: float = 0.0
    memory: float = 0.0
    spread: float = 0.0

    def swing(self, count: int) -> float:
        """Return the variance of a mean of `count` values, relative to that of one value."""
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
        """Return the long-run spread of a series, from the spread of `count` values.

        Few correlated values differ less than the series in the long run.
        """
        return spread * math.sqrt((1 - 1 / count) / (1 - self.swing(count)))


def sample_of(values: Sequence[float]) -> Sample:
    """Return the variation of values, with the bias of short series corrected."""
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
    """Return the common noise of many series."""
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
    """Return the certain noise of one series, which is little for a single series."""
    near = sample.near - 2 / math.sqrt(max(sample.count, 1))
    return _noise(near, 0.0)


def _noise(near: float, far: float) -> Noise:
    near = min(max(near, 0.0), MOST_MEMORY)
    if far <= near**_FAR or not near:
        return Noise(near, near)
    # One part may be independent for each value, and the rest correlated for longer.
    memory = min((far / near) ** (1 / (_FAR - 1)), MOST_MEMORY)
    return Noise(min(near, memory), memory)


NONE = Noise()


class Shift(msgspec.Struct, frozen=True):
    """Describe the rise of a series: its height, its first step, and the level before it."""

    height: float
    since: int
    before: float


class StepSeries:
    """Hold one measure of one rank: its baseline, and the newest steps."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []
        self._newest: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._skipped = 0
        self._spread = 0.0
        self._moves: deque[float] = deque(maxlen=LOOK_BACK)  # the largest move of each block
        self._steps = 0  # number of steps since the last reset
        self.move = 0.0  # distance of the shortest window from the baseline
        self.before: float | None = None  # the median of the baseline, once it exists
        self.began = 0  # the first step of the baseline, if it has replaced an earlier one

    def add(self, step: int, value: float) -> None:
        """Add a step; the steps of a baseline count after `settle`."""
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
        """Return the largest move, recently or now."""
        return max(self._moves, default=0.0)

    def lasting_move(self) -> float:
        """Return how far the steps of the newest two blocks are from the baseline."""
        if self.before is None or not self._newest:
            return 0.0
        newest = [value for _, value in self._newest][-LASTING:]
        return abs(statistics.median(newest) - self.before)

    @property
    def rise_of_halves(self) -> float | None:
        """Return the rise from the first to the second half of an unsettled baseline."""
        if self.before is not None or len(self._first) < BASELINE:
            return None
        values = [value for _, value in self._first]
        half = BASELINE // 2
        return statistics.median(values[half:]) - statistics.median(values[:half])

    def settle(self, *, alone: bool = True) -> None:
        """Set the baseline from the first steps, unless they have changed.

        If only this series has risen, its early half becomes the baseline. Otherwise the machines
        have warmed up, and only the later half counts.
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
        """Set the baseline from the newest steps."""
        self._first = list(self._newest)[-BASELINE:]
        self._newest.clear()
        values = [value for _, value in self._first]
        self.before, self._spread = statistics.median(values), spread_of(values)
        self.began = self._first[0][0]
        self._moves.clear()
        self._steps, self.move = 0, 0.0

    def shift(self, least: float, sure: float, noise: Noise = NONE) -> Shift | None:
        """Return the rise that the newest steps agree on, if it is more than `least`.

        `noise` is the least noise of the series, in addition to that of these few steps.
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
            # A change within the baseline is not noise if the newest steps have much less of it.
            usual = min(self._spread, 2 * spread) if spread else self._spread
            error = self._error(window, spread, usual, noise)
            enough = max(sure * error, wide * max(spread, usual))
            if height > enough and most and few:
                return Shift(height, self._since(middle), self.before)
        return None

    def holds(self, shift: Shift) -> bool:
        """Return whether an earlier rise still exists: steps are nearer to it than to the baseline.

        Some unusual steps do not prove its end, just as they would not prove its start.
        """
        newest = [value for _, value in self._newest][-LASTING:]
        middle = shift.before + shift.height / 2
        return self.before == shift.before and statistics.median(newest) > middle

    def _error(self, window: int, spread: float, usual: float, noise: Noise) -> float:
        """Return the standard error of a window's median relative to the baseline.

        `spread` belongs to the window and `usual` belongs to the baseline.
        """
        steps = len(self._first)
        # estimate the spread from these few steps, which differ less if they are correlated
        if not noise.spread:
            spread = noise.in_the_long_run(spread, window)
            usual = noise.in_the_long_run(usual, steps)
        spread = max(spread, usual, noise.spread)
        return MEDIAN * spread * math.sqrt(noise.swing(window) + noise.swing(steps))

    def has_fallen(self, noise: Noise = NONE) -> bool:
        """Return whether the series has been well below its baseline for long."""
        if self.before is None or len(self._newest) < LASTING:
            return False
        values = [value for _, value in self._newest][-LASTING:]
        height = self.before - statistics.median(values)
        if height <= LEAST_FALL:
            return False
        middle = self.before - height / 2
        most = sum(value < middle for value in values) >= MOST * LASTING
        # The baseline may mix the old and the new level.
        error = self._error(LASTING, spread_of(values), 0.0, noise)
        return most and height > FEW * error

    def lasts(self, shift: Shift) -> bool:
        """Return whether a rise has lasted for LASTING steps."""
        return sum(step >= shift.since for step, _ in self._newest) >= LASTING

    def sample(self, until: int | None = None) -> Sample:
        """Return the variation of the steps. `until` is the first step of a different level."""
        newest = list(self._newest)
        newest = [n for n in newest if n[0] < until] if until is not None else newest[:-_BLOCK]
        return sample_of([value for _, value in (*self._first, *newest)])

    def level(self) -> float:
        """Return the median of the newest steps, or of the baseline if there are too few."""
        if len(self._newest) < _BLOCK:
            return self.before or 0.0
        return statistics.median([value for _, value in self._newest][-LASTING:])

    def is_above(self, least: float) -> bool:
        """Return whether the baseline and the newest steps are significantly above a level."""
        newest = [value for _, value in self._newest][-LASTING:]
        both = [[value for _, value in self._first]]
        both += [newest] if len(newest) >= _BLOCK else []
        return all(
            statistics.median(values) - FEW * MEDIAN * spread_of(values) / math.sqrt(len(values))
            > least
            for values in both
        )

    def rise(self, since: int) -> float:
        """Return how far the steps since a step are above the baseline."""
        newest = [value for step, value in self._newest if step >= since]
        return (
            statistics.median(newest) - self.before if newest and self.before is not None else 0.0
        )

    def rise_now(self) -> float:
        """Return how far the steps of the newest block are above the baseline."""
        if self.before is None or not self._newest:
            return 0.0
        return statistics.median([value for _, value in self._newest][-_BLOCK:]) - self.before

    def _since(self, half: float) -> int:
        """Return the step from which most values are above the middle."""
        best, total, since = -math.inf, 0.0, self._newest[-1][0]
        for step, value in reversed(self._newest):
            total += value - half
            if total >= best:
                best, since = total, step
        return since


class Level:
    """Hold a measure of all ranks, which may change at any time; only its newest steps count."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def add(self, step: int, value: float) -> None:
        self._newest.append((step, value))

    def rose(self, since: int, by: float, few: float = FEW) -> bool:
        """Return whether it has risen by this amount since a step, and not by chance."""
        before = [value for step, value in self._newest if step < since]
        after = [value for step, value in self._newest if step >= since]
        if len(before) < _SHORTEST or not after:
            return False
        error = MEDIAN * spread_of(before) * math.sqrt(1 / len(before) + 1 / len(after))
        rise = statistics.median(after) - statistics.median(before)
        return rise > max(by, few * error)


def settle(series: Mapping[Any, StepSeries], which: Iterable[Any]) -> None:
    """Settle the baselines of all series that have enough steps, relative to each other."""
    rises = {key: rise for key in which if (rise := series[key].rise_of_halves) is not None}
    moves = sorted(map(abs, rises.values()))
    for key, rise in rises.items():
        others = len(moves) - 1
        # The rise itself is one of the moves, so the quarter of the others may be one entry later.
        quarter = others // 4 + (abs(rise) <= moves[others // 4])
        alone = others < 2 or rise > APART * moves[quarter]
        series[key].settle(alone=alone)
