"""Threads for work beside the agent's event loop.

Work that may wait for a file system runs in daemon threads.

The agent's event loop answers the coordinator's pings. If the loop waited for a file system, the
coordinator would declare the node lost. A process can end while its daemon threads still wait; the
threads of `asyncio.to_thread` would prevent that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from rekindle.console import say

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work(*arguments)` in its own thread, and return its result.

    Raises the errors of the work.
    """
    return await started(functools.partial(work, *arguments))


async def in_pool(pool: Executor, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work(*arguments)` in a thread of a pool, and return its result.

    Raises the errors of the work.
    """
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)


def started(work: Callable[[], T], discard: Callable[[T], None] | None = None) -> asyncio.Future[T]:
    """Start work in its own thread, and return a future of its result.

    discard: receives the result, in a thread, if the returned future is cancelled.
    """
    job: concurrent.futures.Future[T] = concurrent.futures.Future()
    job.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the work

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    def on_end(future: asyncio.Future[T]) -> None:
        if discard is not None and future.cancelled():
            _start(functools.partial(_discard, job, discard))

    future = asyncio.wrap_future(job)
    future.add_done_callback(on_end)
    _start(run)
    return future


def _discard(job: concurrent.futures.Future[T], discard: Callable[[T], None]) -> None:
    """Discard the result of work, at its end. The caller of the work no longer waits for it."""
    if job.exception() is None:
        discard(job.result())


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rekindle-work", daemon=True).start()


class Problems:
    """Prints the problems of work that continues, and a repeated one only once."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # the newest problem, by subject

    def report(self, subject: str, text: str, more: str = "") -> None:
        """Print a problem, unless it is the subject's newest one. more: a stack."""
        if self._last.get(subject) != text:
            self._last[subject] = text
            say(text + more)
