"""How long a rank may be at one thing before that is taken for a hang. Pure."""

from __future__ import annotations

from rekindle.protocol.heartbeat_page import Doing

# What the longest so far is multiplied with. A hang is to be decided within three times the longest
# step, and to look at all ranks takes a moment of that.
FACTOR = 2.5
# With fewer known, a step may well be ten times as long as the longest so far. Of 32 that vary by
# ten, evenly on a logarithmic scale, all are below 1/2.5 of the greatest once in 10 million.
ENOUGH = 32
FACTOR_OF_FEW = 10.0
UNKNOWN_S = 60.0  # for what was never seen to end, in a process that computes nothing
# For what may take long where the process computes, and for a slow disk. Others wait in a
# collective meanwhile, and no time-out for that is longer: 10 min of NCCL in torch, 30 of HCCL.
BUSY_S = 1800.0

# What has this long at the least even if it was short so far; all else has the policy's time.
_LEAST_S = {Doing.CHECKPOINT: BUSY_S, Doing.COMPILE: BUSY_S, Doing.EVALUATE: UNKNOWN_S}
# What may take long the first time without computing here: on a device, or on a disk.
_UNKNOWN_S = {Doing.CHECKPOINT: BUSY_S, Doing.COMPILE: BUSY_S, Doing.EVALUATE: BUSY_S}


class Learned:
    """How long one thing has taken so far."""

    def __init__(self) -> None:
        self.times = 0
        self.longest_s = 0.0

    def note(self, seconds: float, times: int = 1) -> None:
        """It was done so often, and took no longer than this."""
        self.times += times
        self.longest_s = max(self.longest_s, seconds)


def limit_s(doing: Doing, learned: Learned, *, least_s: float, busy: bool) -> float:
    """Return after how many seconds at one thing a rank is late with it.

    least_s: the policy's `hang_timeout_s`. busy: its processes compute, or wait for a disk. In a
    step that is no excuse, for whoever is stuck in a loop computes too.
    """
    least_s = max(least_s, _LEAST_S.get(doing, 0.0))
    if busy and doing is not Doing.STEP:
        least_s = max(least_s, BUSY_S)
    if not learned.times:
        return max(least_s, _UNKNOWN_S.get(doing, UNKNOWN_S))
    factor = FACTOR if learned.times >= ENOUGH else FACTOR_OF_FEW
    return max(least_s, factor * learned.longest_s)
