"""What an open incident has come to."""

from __future__ import annotations

import msgspec

from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation.outcome import Loss
from rekindle.simulation.progress import Source


class Repair(msgspec.Struct):
    """A recovery under way.

    until: when all train again, as far as is known. spent: on what, up to then. formed_at: until
    then no generation is formed. awaited: when each node comes that was asked for, by its place.
    back: where the state will come from. anew: all ranks are started anew. ended: a person begins
    the job anew.
    """

    until: float
    spent: list[tuple[Loss, float]] = []
    formed_at: float = 0.0
    awaited: dict[int, float] = {}
    back: Source = Source.LIVE
    roll_back: bool = False
    anew: bool = False
    ended: bool = False
    heaviest: Strategy = Strategy.RETRY

    def nodes_at(self, now: float) -> float:
        """Return when all nodes are there."""
        self.awaited = {place: at for place, at in self.awaited.items() if at > now}
        return max(self.awaited.values(), default=now)

    def lengthen(self, at: float, *spans: tuple[Loss, float]) -> None:
        """Last for these spans at least, one after the other, from a moment on."""
        for loss, seconds in spans:
            at += seconds
            if at > self.until:
                self.spent.append((loss, at - self.until))
                self.until = at
