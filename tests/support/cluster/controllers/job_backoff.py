"""The back-off of a Job before it creates a pod again."""

from __future__ import annotations

import time

from cluster.refusals import Object

_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 600.0


class Backoff:
    """The back-off after a number of consecutive failures."""

    def __init__(self) -> None:
        self.failures = 0
        self.last = 0.0

    def fail(self) -> None:
        self.failures += 1
        self.last = time.monotonic()

    def left(self, scale: float) -> float:
        if not self.failures:
            return 0.0
        delay = min(_BACKOFF_S * 2 ** (self.failures - 1), _LONGEST_BACKOFF_S)
        return max(0.0, delay * scale - (time.monotonic() - self.last))


class Backoffs:
    """The back-offs of all Jobs, in memory only, as in a real controller."""

    def __init__(self) -> None:
        self._all: dict[str, Backoff] = {}

    def of(self, job: Object) -> Backoff:
        """Return the back-off of one Job."""
        return self._all.setdefault(job["metadata"]["uid"], Backoff())

    def forget(self, job: Object) -> None:
        """Reset the back-off of a Job, so that its next pod starts without a delay."""
        self._all.pop(job["metadata"]["uid"], None)
