"""Choose the number of steps between two checkpoints, if Rekindle chooses it. Pure.

A checkpoint costs the time for which it halts training. A fault costs the work since the last
checkpoint. The interval with the least loss follows from both (`best_interval`). The job measures
both while it trains. It starts with few steps, so that a measurement exists soon.
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
BUSY_SHARE = 0.5  # the store may be busy with checkpoints for this share of the time
CHANGE = 0.2  # smaller relative changes of the interval are not announced to the ranks
_NEWEST = 5  # number of measurements for the median
# Published faults of all causes, per device (for Llama 3 a sixth of it, for hardware).
_FAULTS_PER_DEVICE_S = 2.7 / 1000 / 86_400
_HALVINGS = 200


class Chosen(msgspec.Struct, frozen=True):
    """Hold an interval, and its reason."""

    steps: int
    seconds: float
    reason: str


class Interval:
    """Follow the interval of one job.

    `asked` is a number of steps, 0 for never, or AUTO. `devices` is the number of ranks of the job.
    `known` is the interval in steps from an earlier attempt, or 0. `faults` is the number of faults
    in earlier attempts, and `seconds` is their total time.
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
        # a time in this generation, and the step at that time
        self._since: tuple[float, int] | None = None
        self._step_s = 0.0
        self._stalls: deque[float] = deque(maxlen=_NEWEST)
        self._writes: deque[float] = deque(maxlen=_NEWEST)

    @property
    def rate(self) -> float:
        """Return faults per second: the observed faults plus one fault at the expected rate."""
        seconds = self._seconds + self._now - (self._began or self._now)
        return (1 + self._faults) / (1 / self._expected + seconds)

    def at(self, now: float, step: int) -> None:
        """Record the step of training at a time."""
        self._began = now if self._began is None else self._began
        self._now = max(self._now, now)
        if self._since is None or step < self._since[1]:
            self._since = now, step
        elif step > self._since[1] and now > self._since[0]:
            self._step_s = (now - self._since[0]) / (step - self._since[1])

    def fault(self) -> None:
        """Record a fault; the step time must be measured again."""
        self._faults += 1
        self._since = None

    def written(self, *, stall_s: float, write_s: float) -> Chosen | None:
        """Record the cost of a checkpoint; return the interval if it changes."""
        self._stalls.append(stall_s)
        self._writes.append(write_s)
        if not self._automatic or not self._step_s:
            return None
        stall_s, write_s = statistics.median(self._stalls), statistics.median(self._writes)
        seconds = min(max(best_interval(self.rate, stall_s), LEAST_S), MOST_S)
        seconds = max(seconds, write_s / BUSY_SHARE)
        steps = max(1, round(seconds / self._step_s))
        reason = (
            f"a checkpoint stops training for {_short(stall_s)} and takes {_short(write_s)} to "
            f"write; Rekindle expects a fault every {_short(1 / self.rate)}"
        )
        return self._choose(steps, reason)

    def left_out(self) -> Chosen | None:
        """Make checkpoints rarer, because the store was busy and one was left out."""
        if not self._automatic:
            return None
        # The limit is finite, because a store that hangs may recover.
        longest = max(MOST_S, 2 * max(self._writes, default=0.0) / BUSY_SHARE)
        most = max(self.steps, round(longest / self._step_s)) if self._step_s else 2 * self.steps
        steps = min(2 * self.steps, most)
        return self._choose(
            steps, "the store had not finished a checkpoint when the next one was due"
        )

    def _choose(self, steps: int, reason: str) -> Chosen | None:
        if abs(steps - self.steps) <= CHANGE * self.steps:
            return None
        self.steps = steps
        return Chosen(steps, steps * self._step_s, reason)


def best_interval(rate: float, stall: float) -> float:
    """Return the interval with the least lost time, in seconds; infinite without faults.

    `rate` is faults per second, with exponential gaps. Each fault costs the work since the last
    checkpoint. `stall` is the number of seconds for which a checkpoint halts training. The interval
    solves exp(rate * (interval + stall)) * (1 - rate * interval) = 1.
    """
    if rate == 0:
        return math.inf
    low, high = 0.0, 1.0  # bounds of rate * interval
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
    """Return a time as text with at least two digits."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"
