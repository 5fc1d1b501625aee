"""A launcher and its processes: the lifeline, and the signals that it passes on.

A lifeline is a pipe whose other end the launcher holds, so that any death of it is noticed. Only a
job in the foreground has one (`rekindle run`). A job that a flow launches must outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path

# Slurm sends one of them before a time limit. A launcher passes it on to the ranks.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def watch(fd: int, on_cut: Callable[[], object]) -> None:
    """Call `on_cut` once when the launcher has ended; fd -1: there is no lifeline."""
    if fd < 0:
        return
    loop = asyncio.get_running_loop()

    def cut() -> None:
        loop.remove_reader(fd)
        on_cut()

    loop.add_reader(fd, cut)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal."""
    with contextlib.suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # names are any bytes
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False
