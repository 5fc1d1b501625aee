"""A lifeline: a pipe whose other end the launcher holds, so that its death is seen however it dies.

Only a job in the foreground has one (`rekindle run`); a job that a flow launches must outlive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def watch(fd: int, on_cut: Callable[[], None]) -> None:
    """Call `on_cut` once when the launcher is gone; fd -1: there is no lifeline."""
    if fd < 0:
        return
    loop = asyncio.get_running_loop()

    def cut() -> None:
        loop.remove_reader(fd)
        on_cut()

    loop.add_reader(fd, cut)
