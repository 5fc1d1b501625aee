"""How far training is: steps, snapshots, checkpoints, and what a fall back to one of them loses."""

from __future__ import annotations

import enum
import math

import msgspec

_ROUNDING = 1e-6  # of a step; many short stretches of training add up to a whole one


class Source(str, enum.Enum):
    """Where a recovery takes the state from, newest first."""

    LIVE = "live"  # a replica: the broken step alone is lost
    MEMORY = "memory"  # the newest snapshot of the agents
    STORE = "store"  # the newest checkpoint


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """How often state is kept, and what that costs; seconds of training, whole steps.

    stall: how long training halts for a checkpoint. snapshot: 0: there are none.
    overhead: share of the time that Session and snapshots take.
    """

    step: float
    checkpoint: float
    stall: float
    snapshot: float
    overhead: float


class SimulatedProgress:
    """The work that is done, in seconds of undisturbed training of the whole world."""

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self.checkpoints = 0  # complete ones
        self._since = 0.0  # work after the newest of them
        self._stalled = 0.0  # part of the next one that is written

    @property
    def work(self) -> float:
        """All work that is not lost."""
        return self.checkpoints * self._cadence.checkpoint + self._since

    @property
    def step(self) -> int:
        """Steps finished."""
        return _whole(self.work, self._cadence.step)

    def step_of(self, checkpoint: int) -> int:
        """Steps in checkpoint number 1, 2, ...; before that, none."""
        return _whole(max(checkpoint, 0) * self._cadence.checkpoint, self._cadence.step)

    def snapshot_step(self) -> int | None:
        """Return the step of the newest snapshot, if no checkpoint is as new."""
        snapshot = self._kept(Source.MEMORY)
        newer = snapshot > self.checkpoints * self._cadence.checkpoint
        return _whole(snapshot, self._cadence.step) if newer else None

    def train(self, seconds: float, speed: float) -> float:
        """Train for some time at a part of the full world's speed; return the time stalled."""
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
        """Go on from another state; return the work lost."""
        before, newest = self.work, self.checkpoints * self._cadence.checkpoint
        self._since = max(self._kept(source), newest) - newest
        self._stalled = 0.0
        return before - self.work

    def older(self, step: int) -> int:
        """Return the number of the newest checkpoint before this step, 0: there is none."""
        return min(self.checkpoints, max(step - 1, 0) // max(self.step_of(1), 1))

    def roll_back(self, step: int) -> float:
        """Go on from the newest checkpoint before this step; return the work lost."""
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
