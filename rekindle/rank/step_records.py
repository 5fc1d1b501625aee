"""Step records: JSON lines in the rank's metrics file.

A record is written when the step logs, not when it ends: when a rank dies in a step that its peers
live to finish, the step counts, and its record is there. A step that is done again writes again, in
a higher generation; of several records of one step the last one counts.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rekindle.errors import ProtocolError, SessionError
from rekindle.protocol.heartbeat_page import Page


class Records:
    """Writes the records of one rank; path None: to nowhere, page None: nobody looks on."""

    def __init__(self, path: Path | None, page: Page | None, slot: int) -> None:
        self._fd = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._page = page
        self._slot = slot
        self._numbers: tuple[int, dict[str, float]] = (-1, {})  # of the newest step
        self._torn = False  # the last line was written in part
        self._told = False

    def write(self, step: int, generation: int, metrics: Mapping[str, Any]) -> None:
        """Write the record of a step.

        Raises SessionError: a value is no number, text or list of these, or the record is too long.
        """
        record = {
            "step": step,
            "generation": generation,
            "rank": self._slot,
            "at": time.time(),
            "metrics": metrics,
        }
        try:
            line = msgspec.json.encode(record)
            if self._page is not None:
                self._page.put_record(line)
        except (TypeError, ValueError, ProtocolError) as error:
            raise SessionError(f"step.log of step {step}: {error}") from error
        self._numbers = step, _finite_numbers(metrics)
        if self._fd >= 0:
            self._append(line)

    def numbers_of(self, step: int) -> dict[str, float]:
        """Return the finite numbers that this step has logged; only the newest one is known."""
        return self._numbers[1] if self._numbers[0] == step else {}

    def _append(self, line: bytes) -> None:
        """Append a line; a disk that is full costs records, not the training."""
        # What a short write left is closed off, so that it spoils no other record.
        data = (b"\n" if self._torn else b"") + line + b"\n"
        try:
            self._torn = os.write(self._fd, data) < len(data)
        except OSError as error:
            if not self._told:
                self._told = True
                print(f"rekindle: step records are lost: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the metrics file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
