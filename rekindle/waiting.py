"""Wait for a condition or for threads, or repeat a call after an error, with a time limit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def until(is_true: Callable[[], bool], limit_s: float, pause_s: float) -> bool:
    """Wait until the condition is true; return False if that takes longer than the limit."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def retry(call: Callable[[], T], error: type[Exception], limit_s: float, pause_s: float) -> T:
    """Return the result of the call, and repeat the call when it raises this error.

    pause_s: the average pause. The pauses are random, so that two processes that disturb each other
    do not repeat that. Raises the error: the call still fails at the limit.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except error:
            if time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, 2 * pause_s))


def join_all(threads: Iterable[threading.Thread], limit_s: float) -> None:
    """Wait for threads to end. The limit is for all of them together."""
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
