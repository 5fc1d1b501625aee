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
        self._all: dict[str, Backoff] = {}

    def of(self, job: Object) -> Backoff:
        """That of one Job."""
        return self._all.setdefault(job["metadata"]["uid"], Backoff())

    def forget(self, job: Object) -> None:
        """Let the next pod be made at once."""
        self._all.pop(job["metadata"]["uid"], None)
