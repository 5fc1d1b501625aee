"""The strikes of a trace that are still to come, as far as they hit anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rekindle.simulation.job import Job
from rekindle.simulation.trace import Strike


class Upcoming:
    """A place in a trace: strikes are taken in their order."""

    def __init__(self, strikes: Sequence[Strike], job: Job) -> None:
        self._strikes, self._next = strikes, 0
        self._job = job
        self._second: Strike | None = None

    def next_at(self) -> float:
        """Return when the next strike of the trace hits anything."""
        while self._next < len(self._strikes):
            if self._job.hit(self._strikes[self._next]):
                return self._strikes[self._next].at
            self._next += 1
        return math.inf

    def take(self) -> Strike:
        """Take the strike of which `next_at` has told."""
        self._next += 1
        return self._strikes[self._next - 1]

    def take_before(self, until: float) -> Strike | None:
        """Take the next strike, if it comes before a moment, the second one of an incident too."""
        at = self.next_at()
        second = self._second
        if second is not None and second.at <= at:
            self._second = None
            if second.at < until and self._job.hit(second):
                return second
        return self.take() if at < until else None

    def expect(self, second: Strike | None, at: float) -> None:
        """Have another fault strike the recovery that is under way; None: nothing more does."""
        self._second = second and msgspec.structs.replace(second, at=at)

    def pass_over(self, until: float) -> None:
        """Let what strikes before a moment hit nothing."""
        while self.next_at() < until:
            self._next += 1
