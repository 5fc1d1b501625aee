"""All waits of the tests: for an event, with a bound that depends on the speed of the machine.

A bound is only for tests that hang. It is much longer than the event takes. `suite.calibration`
measures a factor at the start of a run, and each bound is scaled by it. No test compares a duration
with a constant, and no test sleeps for a fixed time. `test_suite_rules.py` checks this.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

LIMIT_S = 90.0  # for an event that takes one second on an idle machine
FACTOR_VARIABLE = "REKINDLE_TEST_TIME_FACTOR"
_TICK_S = 0.005

T = TypeVar("T")


class Process(Protocol):
    """A process of subprocess or psutil."""

    def wait(self, timeout: float | None) -> int | None:
        """Wait for the end and return the exit status."""


def factor() -> float:
    """Return how much slower this machine is than the reference; 1 without a measurement."""
    return float(os.environ.get(FACTOR_VARIABLE, "1"))


def bound_s(at_rest_s: float = LIMIT_S) -> float:
    """Return a bound for an event that takes much less than `at_rest_s` on an idle machine."""
    return at_rest_s * factor()


def wait_until(
    true: Callable[[], T], what: str, at_rest_s: float = LIMIT_S, *, pause_s: float = _TICK_S
) -> T:
    """Return the first value of `true()` that is not false.

    `pause_s`: the pause between two calls, longer for a call that uses much of the machine.

    Raises AssertionError: there is no such value within the bound.
    """
    deadline = _Deadline(what, at_rest_s)
    while not (value := true()):
        deadline.check()
        time.sleep(pause_s)
    return value


async def turn_until(true: Callable[[], T], what: str, at_rest_s: float = LIMIT_S) -> T:
    """Return the first value of `true()` that is not false. The event loop runs while it waits.

    Raises AssertionError: there is no such value within the bound.
    """
    deadline = _Deadline(what, at_rest_s)
    while not (value := true()):
        deadline.check()
        await asyncio.sleep(_TICK_S / 10)
    return value


async def turns(count: int = 50) -> None:
    """Run the event loop `count` times, so that all ready callbacks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def finished(work: Awaitable[T], at_rest_s: float = LIMIT_S) -> T:
    """Await the result of `work`, within a bound."""
    return await asyncio.wait_for(work, bound_s(at_rest_s))


def wait_set(event: threading.Event) -> None:
    """Wait until another thread sets the event."""
    assert event.wait(bound_s()), "no thread set the event"


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread."""
    thread.join(bound_s())
    assert not thread.is_alive(), f"{thread.name} has not ended"


def wait_asleep(thread: threading.Thread) -> None:
    """Wait until a thread of this process sleeps in 20 consecutive checks."""
    looks = iter(range(20))

    def still() -> bool:
        nonlocal looks
        looks = looks if _sleeps(thread) else iter(range(20))
        return next(looks, None) is None

    wait_until(still, f"{thread.name} asleep")


def result_of(future: Future[T]) -> T:
    """Return the result of a thread's future, or raise its error."""
    return future.result(bound_s())


def status_of(process: Process) -> int | None:
    """Wait for the end of a process and return its exit status."""
    return process.wait(timeout=bound_s())


def run_command(
    command: Sequence[str], at_rest_s: float = LIMIT_S, **popen: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, with its output as text. Do not check its exit status."""
    settings = {"capture_output": True, "text": True} | popen
    return subprocess.run([*command], check=False, timeout=bound_s(at_rest_s), **settings)


def _sleeps(thread: threading.Thread) -> bool:
    try:
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except FileNotFoundError:
        return False  # it has ended
    return status.rpartition(")")[2].split()[0] == "S"


class _Deadline:
    def __init__(self, what: str, at_rest_s: float) -> None:
        self._what, self._limit_s = what, bound_s(at_rest_s)
        self._at = time.monotonic() + self._limit_s

    def check(self) -> None:
        assert time.monotonic() < self._at, f"not within {self._limit_s:g} s: {self._what}"
