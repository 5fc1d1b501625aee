"""Waiting for an event, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 90.0  # for what takes a second on a quiet machine
_TICK_S = 0.005

T = TypeVar("T")


def wait_until(true: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """Return the first value of `true()` that is not false."""
    deadline = time.monotonic() + limit_s
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(_TICK_S)
