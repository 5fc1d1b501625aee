"""Write a rank's events for the benchmark: one line per event, in the rank's own file.

A line is `EVENT NUMBER INCARNATION TIME PID`. The time is time.time(), the clock that the driver
reads right before it kills. The module uses only the standard library, because a rank writes its
first line before it imports torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

GATE = "slow"  # while a file of this name exists, rank 0 does one step per second
_SLOW_S = 1.0
_LOOK_S = 0.02


class Progress:
    """One rank's file."""

    def __init__(self, folder: str, rank: int) -> None:
        self._gate = Path(folder, GATE)
        self._holds = rank == 0
        self._pid = os.getpid()
        path = Path(folder, f"rank{rank}")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def tell(self, event: str, number: int = 0, incarnation: int = 0) -> None:
        """Write an event with the current time."""
        line = f"{event} {number} {incarnation} {time.time():.6f} {self._pid}\n"
        os.write(self._fd, line.encode())

    def pace(self) -> None:
        """Wait before a step while the other job is measured; all peers wait for rank 0."""
        if not self._holds:
            return
        until = time.monotonic() + _SLOW_S
        while self._gate.exists() and time.monotonic() < until:
            time.sleep(_LOOK_S)
