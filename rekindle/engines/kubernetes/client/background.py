"""Threads that work beside a block of code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def beside(
    works: Mapping[str, Callable[[], None]], stop: Callable[[], object], limit_s: float
) -> Iterator[None]:
    """Run each of these works, by its name, in a daemon thread until the block ends.

    stop: has all of them end. They have `limit_s` seconds for it, because a server that is away
    may hold them up.
    """
    threads = [
        threading.Thread(target=work, name=f"rekindle-{name}", daemon=True)
        for name, work in works.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop()
        deadline = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
