"""Watches a node's ranks, and inspects ranks without progress: their activity and their stacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rekindle.agent import stacks
from rekindle.agent.devices import tools as device_tools
from rekindle.agent.lateness import LONGEST_LOOK_S, LOOK_S, IdleTracker, LatenessTracker
from rekindle.agent.memory_limits import PROC, ROOT, memory_cgroups, read_lines
from rekindle.agent.node_state import NodeState
from rekindle.agent.process_activity import Activity, activities
from rekindle.agent.rank_process import RankProcess
from rekindle.agent.threads import Problems, in_thread
from rekindle.job.spec import JobSpec
from rekindle.profiling.blocked_collectives import CollectivePosition
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import BUSY_S, RankActivity
from rekindle.supervised import in_background

CLOSE_LOOK_S = 0.6  # the time for which an inspection observes processes
AGAIN_S, SELDOM_S = 1.5, 30.0  # the first and the longest pause between reports of late ranks
_RESTS_PER_TIMEOUT = 20
_SLOWEST_REST_S = 5.0

_OOM_FILES = "memory.events", "memory.oom_control"  # cgroup v2, and v1
_OOM_COUNT = "oom_kill"  # the line in both files; it counts kills by any out-of-memory killer

NEAR_S = 2.0  # between a kill and the end of the process, which first frees its memory


class OomCounter:
    """Counts kills in the cgroup of this process. Ranks are in the same one, unless they move.

    root: where the cgroup file systems are mounted.
    """

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        own = memory_cgroups(root, proc)[:1]  # the cgroups above also count other processes
        files = (folder / name for folder in own for name in _OOM_FILES)
        self._file = next((file for file in files if file.exists()), None)
        self._count = self._read()
        self._risen_at = -NEAR_S

    def look(self, now: float) -> None:
        """Record whether the kernel has killed since the last call; callers must call it often."""
        before, self._count = self._count, self._read()
        if self._count > before:
            self._risen_at = now

    def killed_lately(self, now: float) -> bool:
        """Return whether a process that now ends by SIGKILL may be a victim of the OOM killer."""
        self.look(now)
        return now - self._risen_at < NEAR_S

    def _read(self) -> int:
        counts = map(str.split, read_lines(self._file) if self._file is not None else ())
        return next((int(words[1]) for words in counts if words[:1] == [_OOM_COUNT]), 0)


class Watchdog:
    """Watches the heartbeat pages of a node's ranks; without a Session, their processes.

    oom: the kernel's count of its kills. positions: returns the position of each rank in its
    collectives, from its records.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankProcess],
        spec: JobSpec,
        send: Callable[[protocol.Message], None],
        state: NodeState,
        positions: Callable[[], Mapping[int, CollectivePosition]],
    ) -> None:
        policy = spec.policy
        self._state = state
        self._positions = positions
        self.oom = OomCounter()
        self._per_node = spec.processes_per_node
        self._ranks = ranks
        self._idle_timeout_s = policy.idle_timeout_s
        self._send = send
        self._between_timeout_s = policy.between_timeout_s
        self._watch = LatenessTracker(policy.hang_timeout_s, policy.between_timeout_s)
        self._rest = IdleTracker()
        self._rest_every_s = min(policy.idle_timeout_s / _RESTS_PER_TIMEOUT, _SLOWEST_REST_S)
        self._rested_at = time.monotonic()  # the time of the last complete look at idle processes
        self._resting: set[asyncio.Task[None]] = set()
        self._problems = Problems()
        self._looked = 0  # the number of inspections so far
        self._close_looks = 0  # running inspections; ranks write their stacks then
        self._reported: set[int] = set()  # ranks that were reported, and are still late
        self._reported_at, self._pause_s = 0.0, AGAIN_S

    async def watch(self) -> None:
        """Report late ranks without end.

        An error ends only one look, because later looks must still find a hang.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look_around(time.monotonic())
            except Exception as error:
                self._problems.report(
                    "watch", f"the watchdog failed to check the progress of ranks: {error!r}"
                )

    def _look_around(self, now: float) -> None:
        self.oom.look(now)
        late = self._watch.look({r: p.page.mark for r, p in self._ranks.items()}, now)
        outside = [p for p in self._ranks.values() if p.page.mark.doing is RankActivity.OUTSIDE]
        self._note_rest(outside, now)
        rested = self._rest.rested_s
        late += [p.rank for p in outside if rested(p.pid) >= self._idle_timeout_s]
        if not late:
            self._reported, self._pause_s = set(), AGAIN_S
        elif not self._reported.issuperset(late) or now >= self._reported_at + self._pause_s:
            self._pause_s = AGAIN_S if not self._reported else min(2 * self._pause_s, SELDOM_S)
            news = next((rank for rank in late if rank not in self._reported), late[0])
            self._reported, self._reported_at = {*self._reported, *late}, now
            self._send(protocol.RankStalled(rank=news, generation=self._state.generation))

    def _note_rest(self, outside: list[RankProcess], now: float) -> None:
        """At intervals, look at the processes of ranks outside of a Session.

        A task does this, because a device's tool may be slow.
        """
        elapsed_s = now - self._rested_at
        busy = self._resting or self._close_looks
        if not outside or elapsed_s < self._rest_every_s or busy:
            return
        seconds = min(elapsed_s, self._rest_every_s + LONGEST_LOOK_S)
        in_background(self._see_rest(outside, seconds, now), self._resting)

    async def _see_rest(self, outside: list[RankProcess], seconds: float, now: float) -> None:
        looked = self._looked
        try:
            found = await in_thread(activities, [process.pid for process in outside])
            still = self._rest.still(found, seconds)
            of = {p.rank % self._per_node: p.pid for p in outside if p.pid in still}
            use = await device_tools.utilisations(of)
        except Exception as error:
            self._problems.report(
                "rest", f"the watchdog cannot measure the activity of ranks: {error!r}"
            )
            return
        if self._looked == looked:  # otherwise ranks have written their stacks since
            self._rested_at = now
            self._rest.look(found, seconds, {of[device]: used for device, used in use.items()})

    async def look(self, order: protocol.InspectRanks) -> None:
        """Inspect all ranks, and report the result, or the error that prevents it."""
        self._looked += 1
        self._close_looks += 1
        looks, why = list[protocol.RankInspection](), ""
        try:
            looks = await self._look()
        except Exception as error:
            why = f"the agent cannot inspect the ranks: {error!r}"
            self._problems.report("look", why)
        finally:
            self._close_looks -= 1
        self._send(protocol.RanksInspected(serial=order.serial, looks=tuple(looks), error=why))

    async def _look(self) -> list[protocol.RankInspection]:
        processes = dict(self._ranks)
        waited = {rank: process.page.waiting_since_ns for rank, process in processes.items()}
        asked = (stacks.stack_of(p.pid, p.stack_file) for p in processes.values())
        written = await asyncio.gather(*asked)  # before the measurement, which must not include it
        pids = [process.pid for process in processes.values()]
        before, began = await in_thread(activities, pids), time.monotonic()
        await asyncio.sleep(CLOSE_LOOK_S)
        after, seconds = await in_thread(activities, pids), time.monotonic() - began
        looks = []
        for (rank, process), stack in zip(processes.items(), written, strict=True):
            pid = process.pid
            if pid not in before or pid not in after or self._ranks.get(rank) is not process:
                continue  # it has ended
            waits = 0 < process.page.waiting_since_ns == waited[rank]
            look = self._tell(process, stack, before[pid], after[pid], seconds, waits=waits)
            looks.append(look)
            self._rest.overlook(pid, after[pid])
        return looks

    def _tell(
        self,
        process: RankProcess,
        written: str,
        before: Activity,
        now: Activity,
        seconds: float,
        *,
        waits: bool,
    ) -> protocol.RankInspection:
        rank, mark = process.rank, process.page.mark
        stack = stacks.main_thread(written)
        computes = now.is_busy(before, seconds)
        waits = waits or stacks.waits_for_others(stack, busy=computes)
        lives = now.moves(before, seconds) or now.wakes(before, seconds)
        moves = lives and mark.doing is not RankActivity.STEP
        if mark.doing is RankActivity.OUTSIDE:
            elapsed_s, limit_s = self._rest.rested_s(process.pid), self._idle_timeout_s
        else:
            elapsed_s = self._watch.elapsed_s(rank)
            limit_s = self._watch.limit_s(rank, busy=computes or moves)
            if now.waits_for_disk(before):  # a new process would wait for the same disk
                limit_s = max(limit_s, self._between_timeout_s)
            if stacks.compiles(written):  # in any thread
                limit_s = max(limit_s, BUSY_S)
        return protocol.RankInspection(
            rank=rank,
            finished=mark.finished,
            doing=mark.doing,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            waiting=waits,
            operations=process.page.operations,
            recent=process.page.recent if waits else (),
            stopped=now.stopped,
            busy=computes or moves,
            where=stacks.innermost(stack),
            stack="" if waits else stack[: stacks.MOST],
            position=self._positions().get(rank),
        )
