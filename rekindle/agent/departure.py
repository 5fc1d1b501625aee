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
import time
from collections.abc import Callable

from rekindle.agent.ranks import RankSupervisor
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.console import say
from rekindle.job.lifeline import catches

# The time that a coordinator may take to end the job after the agent got its signal. The ranks
# train meanwhile. Kubernetes kills all processes 30 s after the signal.
ORDERS_S = 5.0
GRACE_S = 10.0  # between SIGTERM and SIGKILL, if no coordinator orders the end
_TICK_S = 0.05


class Departure:
    """The end of this agent. end: ends it at once. is_connected: whether it has a coordinator.

    is_alone: the node ends without orders of a coordinator.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        snapshots: NodeSnapshots,
        *,
        is_connected: Callable[[], bool],
        end: Callable[[], object],
    ) -> None:
        self._ranks = ranks
        self._snapshots = snapshots
        self._is_connected = is_connected
        self._end = end
        self._task: asyncio.Task[None] | None = None
        self.is_alone = False

    def demand(self) -> None:
        """End the agent after the orders of its coordinator. Later demands have no effect."""
        if self._task is None:
            self._task = asyncio.create_task(self._wait())

    def demand_twice(self) -> None:
        """End the agent as `demand` does; at once if that was demanded before."""
        if self._task is None:
            self.demand()
        else:
            self._end()

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the ranks that have a handler for it. It would end other ranks."""
        heard = [rank for rank in self._ranks.live if catches(rank.pid, number)]
        for rank in heard:
            rank.signal(number)
        if not heard:
            name = signal.Signals(number).name
            say(f"{name} has no effect, because no rank of this node has a handler for it")

    async def _wait(self) -> None:
        deadline = time.monotonic() + ORDERS_S
        while self._is_connected():
            if time.monotonic() > deadline and not self._ranks.job_ends:
                break  # only this node ends
            await asyncio.sleep(_TICK_S)
        else:
            self.is_alone = True
        self._end()

    async def end_alone(self) -> None:
        """End the ranks with a grace period, and write the newest snapshot as a checkpoint."""
        if not self._ranks.live and not self._snapshots.kept:
            return
        say("no coordinator ends the job; the agent ends its ranks and keeps their state")
        if not self._ranks.job_ends:  # otherwise the ranks got the signal already
            for rank in self._ranks.live:
                rank.signal(signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ranks.all_gone(), GRACE_S)
        if self._ranks.is_sharded:
            say("the agent cannot write a checkpoint of shards without a coordinator")
        elif written := await self._snapshots.write_alone():
            path, error = written.path, written.error
            say(f"final checkpoint: {f'none: {error}' if error else f'it is at {path}'}")
