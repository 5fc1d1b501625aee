"""All waits of the tests: for an event, with a bound that follows the machine.

A bound is for tests that hang. It is far above what the event takes, and is scaled by the factor
that `suite.calibration` measures at the start of a run. No test compares a duration with a
constant.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from suite import calibration

LIMIT_S = 90.0  # for what takes a second on a quiet machine
_TICK_S = 0.005

T = TypeVar("T")


def bound_s(at_rest_s: float = LIMIT_S) -> float:
    """Return a bound for something that ends well within `at_rest_s` on a quiet machine."""
    return at_rest_s * calibration.factor()


def wait_until(true: Callable[[], T], what: str, at_rest_s: float = LIMIT_S) -> T:
    """Return the first value of `true()` that is not false."""
    limit_s = bound_s(at_rest_s)
    deadline = time.monotonic() + limit_s
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(_TICK_S)


def run_command(
    command: Sequence[str], at_rest_s: float = LIMIT_S, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text; its exit status is not checked."""
    settings = {"capture_output": True, "text": True} | popen
    return subprocess.run([*command], check=False, timeout=bound_s(at_rest_s), **settings)
