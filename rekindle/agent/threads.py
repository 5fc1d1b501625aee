"""Work that may wait for a file system runs in daemon threads.

The agent's event loop answers the coordinator's pings. If the loop waited for a file system, the
coordinator would declare the node lost. A process ends while its daemon threads still wait; the
threads of `asyncio.to_thread` would keep it.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[], object]


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work(*arguments)` in a thread of its own, and return its result.

    Raises what the work raises.
    """
    job = _Job(functools.partial(work, *arguments))
    threading.Thread(target=job, name="rekindle-work", daemon=True).start()
    result: T = await job.future
    return result


class Worker:
    """One thread that does its work in order."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Work) -> None:
        """Have the thread do this, which must raise nothing."""
        self._waiting.put(work)

    async def result(self, work: Callable[[], T], limit_s: float) -> T:
        """Have the thread do this, and return its result.

        Raises TimeoutError: it has not ended within limit_s seconds; what the work raises.
        """
        job = _Job(work)
        self._waiting.put(job)
        result: T = await asyncio.wait_for(job.future, limit_s)
        return result

    def close(self, limit_s: float) -> None:
        """Wait for the end of all work, for limit_s seconds at most."""
        self._waiting.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()


class _Job:
    """Work whose result a coroutine waits for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def __call__(self) -> None:
        try:
            result = self._work()
        except BaseException as error:
            self._tell(functools.partial(self.future.set_exception, error))
        else:
            self._tell(functools.partial(self.future.set_result, result))

    def _tell(self, settle: Callable[[], None]) -> None:
        def tell() -> None:
            if not self.future.done():  # else nobody waits any more
                settle()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)
