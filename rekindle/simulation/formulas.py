"""Closed formulas for a job that falls back to its last checkpoint. Pure; all times in seconds."""

from __future__ import annotations

import math


def goodput(*, rate: float, interval: float, stall: float, downtime: float) -> float:
    """Return the share of time in which training makes progress that lasts.

    rate: faults per second, each of which costs `downtime` and what was done since the last of the
    checkpoints, that are written every `interval` of training and halt it for `stall`. Exact for
    faults with exponential gaps that strike in stall and downtime as well: in such a world a piece
    of work of length L takes exp(rate * downtime) * (exp(rate * L) - 1) / rate on average.
    With a step as the interval and no stall: recovery that loses the broken step alone.
    """
    if rate == 0:
        return interval / (interval + stall)
    lasting = rate * interval * math.exp(-rate * downtime)
    try:
        return lasting / math.expm1(rate * (interval + stall))
    except OverflowError:
        return 0.0  # no checkpoint is ever reached


def young(rate: float, stall: float) -> float:
    """Return the interval by Young (1974): good where faults are rare."""
    return math.sqrt(2 * stall / rate) if rate else math.inf


def daly(rate: float, stall: float) -> float:
    """Return the interval by Daly (2006), first order; where that does not hold, the mean gap."""
    if rate == 0:
        return math.inf
    return young(rate, stall) - stall if stall * rate < 2 else 1 / rate


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t distribution (Abramowitz and Stegun 26.7.5).

    Within 0.3 % from 4 degrees of freedom on.
    """
    z = 1.959963984540054
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + ((third / freedom + second) / freedom + first) / freedom
