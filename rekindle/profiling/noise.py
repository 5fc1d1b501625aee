"""How much figures vary by themselves, where each may take after the one before it. Pure."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Iterable, Sequence

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
