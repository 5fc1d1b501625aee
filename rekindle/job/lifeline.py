"""A lifeline: a pipe whose other end the launcher holds, so that any death of it is noticed.

Only a job in the foreground has one (`rekindle run`). A job that a flow launches must outlive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def watch(fd: int, on_cut: Callable[[], object]) -> None:
    """Call `on_cut` once when the launcher has ended; fd -1: there is no lifeline."""
    if fd < 0:
        return
    loop = asyncio.get_running_loop()

    def cut() -> None:
        loop.remove_reader(fd)
        on_cut()

    loop.add_reader(fd, cut)
