"""Simulate progress: steps, snapshots, checkpoints, and the loss when training returns to one."""

from __future__ import annotations

import enum
import math

import msgspec

_ROUNDING = 1e-6  # in steps; the sum of many short stretches has a rounding error


class Source(str, enum.Enum):
    """Name the sources of state for a recovery, the newest first."""

    LIVE = "live"  # a replica: the ranks repeat only the interrupted step
    MEMORY = "memory"  # the newest snapshot of the agents
    STORE = "store"  # the newest checkpoint


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """Describe how often the job saves state, and the cost.

    All values are seconds of training in whole steps. `stall` is how long a checkpoint halts
    training. `snapshot` 0 means that the job takes no snapshots. `overhead` is the share of the
    time that Session and snapshots take.
    """

    step: float
    checkpoint: float
    stall: float
    snapshot: float
    overhead: float


class SimulatedProgress:
    """Hold the work done, in seconds of undisturbed training of the whole world."""

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self.checkpoints = 0  # number of complete checkpoints
        self._since = 0.0  # work after the newest checkpoint
        self._stalled = 0.0  # seconds already spent on the next checkpoint

    @property
    def work(self) -> float:
        """Return all work that is not lost."""
        return self.checkpoints * self._cadence.checkpoint + self._since

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return _whole(self.work, self._cadence.step)

    def step_of(self, checkpoint: int) -> int:
        """Return the number of steps in checkpoint 1, 2, ...; 0 for lower numbers."""
        return _whole(max(checkpoint, 0) * self._cadence.checkpoint, self._cadence.step)

    def snapshot_step(self) -> int | None:
        """Return the step of the newest snapshot, or None if a checkpoint is as new."""
        snapshot = self._kept(Source.MEMORY)
        newer = snapshot > self.checkpoints * self._cadence.checkpoint
        return _whole(snapshot, self._cadence.step) if newer else None

    def train(self, seconds: float, speed: float) -> float:
        """Train for some seconds at a share of the full world's speed; return the stalled time."""
        plan = self._cadence
        speed *= 1 - plan.overhead
        before = self.work
        span = plan.checkpoint / speed
        cycles, rest = divmod(self._since / speed + self._stalled + seconds, span + plan.stall)
        self.checkpoints += int(cycles)
        self._since = min(rest * speed, plan.checkpoint)
        self._stalled = max(rest - span, 0.0)
        return max(seconds - (self.work - before) / speed, 0.0)

    def fall_back(self, source: Source) -> float:
        """Continue from another state; return the work lost."""
        before, newest = self.work, self.checkpoints * self._cadence.checkpoint
        self._since = max(self._kept(source), newest) - newest
        self._stalled = 0.0
        return before - self.work

    def older(self, step: int) -> int:
        """Return the number of the newest checkpoint before this step, or 0."""
        return min(self.checkpoints, max(step - 1, 0) // max(self.step_of(1), 1))

    def roll_back(self, step: int) -> float:
        """Continue from the newest checkpoint before this step; return the work lost."""
        before = self.work
        self.checkpoints = self.older(step)
        self._since = self._stalled = 0.0
        return before - self.work

    def _kept(self, source: Source) -> float:
        plan = self._cadence
        every = {Source.LIVE: plan.step, Source.MEMORY: plan.snapshot, Source.STORE: 0.0}[source]
        return _whole(self.work, every) * every if every else 0.0


def _whole(work: float, unit: float) -> int:
    return math.floor(work / unit + _ROUNDING)
