"""Finds processes that a signal has stopped (SIGSTOP) where no time limit applies.

A script may import, build its model and load its state for any time, so a rank outside of a step is
never late. Only the state of its process shows that it cannot continue. The same applies to the
fork server, which imports the framework, and to the ranks' store. A process that a tracer holds has
another state, and counts as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping

from rekindle.agent.node_state import NodeState
from rekindle.agent.process_activity import STOPPED, states
from rekindle.agent.rank_process import RankProcess
from rekindle.agent.threads import Problems, in_thread
from rekindle.console import say
from rekindle.protocol import agent as protocol

LOOK_S = 0.5


class StopCounter:
    """Counts the consecutive looks at which each process was stopped.

    It counts looks and not time: a watcher that was stopped itself has not observed that time.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._seen: dict[int, int] = {}

    def look(self, states: Mapping[int, str]) -> list[int]:
        """Note the states of processes, by pid. Return those that were stopped for long enough.

        The result has a process that stays stopped once in each number of looks.
        """
        stopped = (pid for pid, state in states.items() if state == STOPPED)
        self._seen = {pid: self._seen.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, looks in self._seen.items() if looks % self._looks == 0]


class StoppedProcesses:
    """Reports stopped ranks, and ends stopped helpers, which their users then replace.

    helpers: returns the pids of helpers on which the ranks depend now. limit_s: how long a process
    must be stopped, about.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankProcess],
        helpers: Callable[[], list[int]],
        limit_s: float,
        send: Callable[[protocol.Message], None],
        state: NodeState,
    ) -> None:
        self._ranks = ranks
        self._helpers = helpers
        self._counter = StopCounter(max(2, round(limit_s / LOOK_S)))
        self._send = send
        self._state = state
        self._problems = Problems()

    async def watch(self) -> None:
        """Look without end. An error ends only one look."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception as error:
                self._problems.report("stopped", f"the agent cannot read processes: {error!r}")

    async def _look(self) -> None:
        watched = [rank.pid for rank in self._ranks.values()]
        found = await in_thread(states, [*watched, *self._helpers()])
        long = self._counter.look(found)
        for rank, process in self._ranks.items():
            if process.pid in long:
                generation = self._state.generation
                self._send(protocol.RankStalled(rank=rank, generation=generation, stopped=True))
        for pid in set(self._helpers()).intersection(long):
            say(f"process {pid} of the agent is stopped by a signal; the agent ends it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
