"""How long a Job waits before it makes a pod anew."""

from __future__ import annotations

import time

from cluster.refusals import Object

_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 600.0


class Backoff:
    """When the next pod may be made after so many failures in a row."""

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
    """Of all Jobs. They are in memory only, as those of a real controller are."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], Backoff] = {}

    def of(self, job: Object, index: int) -> Backoff:
        """Of one index where it has a limit of its own, else of the whole job."""
        own = index if "backoffLimitPerIndex" in job["spec"] else -1
        return self._all.setdefault((job["metadata"]["uid"], own), Backoff())

    def forget(self, job: Object) -> None:
        for key in [key for key in self._all if key[0] == job["metadata"]["uid"]]:
            del self._all[key]
