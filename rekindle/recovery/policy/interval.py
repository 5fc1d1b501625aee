"""How many steps lie between two checkpoints, where Rekindle is to choose. Pure.

A checkpoint costs what it stops training for; without one, a fault costs what was done since the
last. The interval that wastes the least follows from the two (`best_interval`). Both are measured
while the job trains, and until then it begins with few steps, so that there is a measurement soon.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

import msgspec

AUTO: Final = "auto"
FIRST_STEPS = 10
LEAST_S = 10.0
MOST_S = 3600.0
BUSY_SHARE = 0.5  # of the time in which the store may be busy with checkpoints
CHANGE = 0.2  # by which the interval has to be another one before all are told
_NEWEST = 5  # measurements that count: their median
# Faults of all causes that were published, by device (Llama 3 has a sixth of it, of hardware).
_FAULTS_PER_DEVICE_S = 2.7 / 1000 / 86_400
_HALVINGS = 200


class Chosen(msgspec.Struct, frozen=True):
    """An interval, and what it follows from."""

    steps: int
    seconds: float
    reason: str


class Interval:
    """The interval of one job.

    asked: steps, 0: never, or AUTO. devices: ranks of the job. known: steps, of an earlier attempt
    (0: none). faults, seconds: how many there were in how long a time, in earlier attempts.
    """

    def __init__(
        self, asked: int | str, *, devices: int, known: int, faults: int, seconds: float
    ) -> None:
        self._automatic = asked == AUTO
        self.steps = int(asked) if asked != AUTO else known or FIRST_STEPS
        self._expected = devices * _FAULTS_PER_DEVICE_S
        self._faults, self._seconds = faults, seconds
        self._began: float | None = None
        self._now = 0.0
        self._since: tuple[float, int] | None = None  # a moment of this generation, and its step
        self._step_s = 0.0
        self._stalls: deque[float] = deque(maxlen=_NEWEST)
        self._writes: deque[float] = deque(maxlen=_NEWEST)

    @property
    def rate(self) -> float:
        """Faults per second: those that were seen, and as if there had been one as expected."""
        seconds = self._seconds + self._now - (self._began or self._now)
        return (1 + self._faults) / (1 / self._expected + seconds)

    def at(self, now: float, step: int) -> None:
        """Training is in this step at this time."""
        self._began = now if self._began is None else self._began
        self._now = max(self._now, now)
        if self._since is None or step < self._since[1]:
            self._since = now, step
        elif step > self._since[1] and now > self._since[0]:
            self._step_s = (now - self._since[0]) / (step - self._since[1])

    def fault(self) -> None:
        """Training was broken; how fast it is, is measured anew."""
        self._faults += 1
        self._since = None

    def written(self, *, stall_s: float, write_s: float) -> Chosen | None:
        """Note what a checkpoint has cost; return the interval if it is another one now."""
        self._stalls.append(stall_s)
        self._writes.append(write_s)
        if not self._automatic or not self._step_s:
            return None
        stall_s, write_s = statistics.median(self._stalls), statistics.median(self._writes)
        seconds = min(max(best_interval(self.rate, stall_s), LEAST_S), MOST_S)
        seconds = max(seconds, write_s / BUSY_SHARE)
        steps = max(1, round(seconds / self._step_s))
        reason = (
            f"one stops training for {_short(stall_s)} and takes {_short(write_s)} to write; "
            f"a fault is expected every {_short(1 / self.rate)}"
        )
        return self._choose(steps, reason)

    def left_out(self) -> Chosen | None:
        """A checkpoint was left out, for the store was busy: make them rarer."""
        if not self._automatic:
            return None
        # Not for ever: a store that hangs answers again one day.
        longest = max(MOST_S, 2 * max(self._writes, default=0.0) / BUSY_SHARE)
        most = max(self.steps, round(longest / self._step_s)) if self._step_s else 2 * self.steps
        steps = min(2 * self.steps, most)
        return self._choose(steps, "the store was not done with one when the next was due")

    def _choose(self, steps: int, reason: str) -> Chosen | None:
        if abs(steps - self.steps) <= CHANGE * self.steps:
            return None
        self.steps = steps
        return Chosen(steps, steps * self._step_s, reason)


def best_interval(rate: float, stall: float) -> float:
    """Return the interval at which the least time is lost, in seconds; infinite without faults.

    rate: faults per second, with exponential gaps, each of which costs what was done since the last
    checkpoint. stall: seconds for which a checkpoint halts training.
    It is where exp(rate * (interval + stall)) * (1 - rate * interval) = 1.
    """
    if rate == 0:
        return math.inf
    low, high = 0.0, 1.0  # of rate * interval
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + rate * stall > 0:
            low = middle
        else:
            high = middle
        if middle in (low, high) and high - low <= low * 1e-12:
            break
    return low / rate


def _short(seconds: float) -> str:
    """Return a time as people read it, of two digits and more."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"
