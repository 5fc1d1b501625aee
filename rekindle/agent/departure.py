"""The end of an agent that a signal demands, or the end of its launcher.

Often the coordinator gets the same signal, because Slurm and Kubernetes send it to all processes of
a job. Then the coordinator ends the job, and the agent carries out its orders: its ranks have their
grace period, and the agents write the final checkpoint. If no coordinator is left to give these
orders, the agent does the same for its own node. If the coordinator continues the job, the agent
ends at once, and another node replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from rekindle.agent.coordinator_connection import Link
from rekindle.agent.ranks import RankSupervisor
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.console import say
from rekindle.job.lifeline import catches
from rekindle.supervised import in_background, within

# A coordinator that got the same signal says so in its answers within this time. The ranks train
# meanwhile. Kubernetes kills all processes 30 s after the signal.
CONTINUES_S = 3.0
SILENT_S = 8.0  # a coordinator that has not answered for so long ends no job
ASK_EVERY_S = 0.5
GRACE_S = 10.0  # between SIGTERM and SIGKILL, if no coordinator orders the end
_TICK_S = 0.05


class Departure:
    """The end of this agent.

    link: the connection to the coordinator. end: ends the agent; with True without its work.
    write_limit_s: for the final checkpoint of an agent without a coordinator.

    is_alone: the node ends without orders of a coordinator.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        snapshots: NodeSnapshots,
        *,
        link: Link,
        end: Callable[[bool], object],
        write_limit_s: float,
    ) -> None:
        self._ranks = ranks
        self._snapshots = snapshots
        self._link = link
        self._end = end
        self._write_limit_s = write_limit_s
        self._task: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.is_alone = False

    def demand(self) -> None:
        """End the agent after the orders of its coordinator. Later demands have no effect."""
        if self._task is None:
            self._task = in_background(self._wait(), self._background)

    def demand_twice(self) -> None:
        """End the agent as `demand` does; at once if that was demanded before."""
        if self._task is None:
            self.demand()
        else:
            self._end(True)

    def begin_end(self) -> None:
        """Note that the agent ends now. A demand that still waits has no effect any more."""
        for task in self._background:
            task.cancel()

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the ranks that have a handler for it. It would end other ranks."""
        heard = [rank for rank in self._ranks.live if catches(rank.pid, number)]
        for rank in heard:
            rank.signal(number)
        if not heard:
            name = signal.Signals(number).name
            say(f"{name} has no effect, because no rank of this node has a handler for it")

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        began = asked_at = loop.time()
        in_background(self._link.ask(), self._background)
        while self._link.is_open:
            now = loop.time()
            if now > asked_at + ASK_EVERY_S:
                asked_at = now
                in_background(self._link.ask(), self._background)
            answers = self._link.answered_at > began
            ends = self._ranks.job_ends or (answers and self._link.job_ends)
            if answers and not ends and now > began + CONTINUES_S:
                break  # only this node ends
            if not answers and not ends and now > began + SILENT_S:
                self.is_alone = True
                break
            await asyncio.sleep(_TICK_S)
        else:
            self.is_alone = True
        self._end(False)

    async def end_alone(self) -> bool:
        """End the ranks with a grace period, and write the newest snapshot as a checkpoint.

        Return False if the checkpoint takes too long. Its thread then still waits.
        """
        if not self._ranks.live and not self._snapshots.kept:
            return True
        say("no coordinator ends the job; the agent ends its ranks and keeps their state")
        if not self._ranks.job_ends:  # otherwise the ranks got the signal already
            for rank in self._ranks.live:
                rank.signal(signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._ranks.all_gone(), GRACE_S)
        if self._ranks.is_sharded:
            say("the agent cannot write a checkpoint of shards without a coordinator")
            return True
        try:
            written = await within(self._snapshots.write_alone(), self._write_limit_s)
        except asyncio.TimeoutError:
            limit = f"{self._write_limit_s:g} s"
            say(f"final checkpoint: none: the store did not answer within {limit}")
            return False
        if written:
            path, error = written.path, written.error
            say(f"final checkpoint: {f'none: {error}' if error else f'it is at {path}'}")
        return True
