"""Simulate the job: its time, its progress, its nodes and its spares."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import msgspec

from rekindle.recovery.policy.policy import Policy
from rekindle.simulation.costs import Costs
from rekindle.simulation.outcome import Loss, World
from rekindle.simulation.progress import Cadence, SimulatedProgress, Source
from rekindle.simulation.trace import Strike


class Pool:
    """Hold the nodes outside the world; times are seconds since the start of the job.

    `spares` None means that a spare is always ready. Otherwise the pool gets no other nodes: a node
    that leaves the world becomes a spare after its repair.
    """

    def __init__(self, spares: int | None) -> None:
        self._endless = spares is None
        self._ready = [-math.inf] * (spares or 0)  # when each spare is ready, the earliest first
        self._out: list[float] = []  # when the repair of each node ends
        # the same, without nodes that failed together with their group
        self._out_alone: list[float] = []
        self.lost = 0  # number of nodes lost since the start

    def free(self, now: float) -> int:
        """Return the number of ready spares."""
        if self._endless:
            return 1_000_000
        return sum(at <= now for at in self._ready)

    def out(self, now: float, *, alone: bool = False) -> int:
        """Return the number of nodes under repair.

        With `alone`, the result omits nodes that failed together with their group.
        """
        found = self._out_alone if alone else self._out
        while found and found[0] <= now:
            heapq.heappop(found)
        return len(found)

    def lose(self, now: float, repair_s: float, *, alone: bool) -> None:
        """Move a node to repair. alone: it did not fail together with its group."""
        heapq.heappush(self._out, now + repair_s)
        if alone:
            heapq.heappush(self._out_alone, now + repair_s)
        self.lost += 1
        if not self._endless:
            heapq.heappush(self._ready, now + repair_s)

    def take(self, now: float) -> float:
        """Reserve the next spare for a place; return when the spare is ready."""
        return now if self._endless else max(now, heapq.heappop(self._ready))


class Setting(msgspec.Struct, frozen=True):
    """Hold everything that a run depends on, except its faults."""

    policy: Policy
    world: World
    costs: Costs
    cadence: Cadence


class Job:
    """Hold the state of the simulated job; the caller reports each event.

    All times are seconds since the start of the job. `newest` and `resumed` are as in
    `recovery.policy.history.Situation`. `missing` holds the places that the world trains without.
    `lost` is the time without progress, by cause.
    """

    def __init__(self, setting: Setting, end: float) -> None:
        self.now = 0.0
        self.end = end
        self.newest = 0
        self.resumed = 0
        self.progress = SimulatedProgress(setting.cadence)
        self.pool = Pool(setting.world.spares)
        self.missing: set[int] = set()
        self.lost = dict.fromkeys(Loss, 0.0)
        self._setting = setting
        self._tenants = Counter[int]()  # how often each place got another node
        self._coming: list[tuple[float, int]] = []  # when a node arrives for a missing place

    @property
    def is_over(self) -> bool:
        """Return whether the simulated time has ended."""
        return self.now >= self.end

    @property
    def grows_at(self) -> float:
        """Return when the next node for a missing place arrives."""
        return self._coming[0][0] if self._coming else math.inf

    def host(self, place: int) -> str:
        """Return the name of the machine that has this place now."""
        return f"{place}.{self._tenants[place]}"

    def hit(self, strike: Strike) -> list[int]:
        """Return the places in use that a fault hits.

        A fault of a lemon has no effect after another node has replaced that node.
        """
        if strike.of_lemon and self._tenants[strike.nodes[0]]:
            return []
        return [place for place in strike.nodes if place not in self.missing]

    def train(self, until: float) -> None:
        """Train until a moment, or until the end of the simulated time."""
        seconds = min(until, self.end) - self.now
        if seconds <= 0:
            return
        overhead = self._setting.cadence.overhead
        speed = 1 - len(self.missing) / self._setting.world.nodes
        stalled = self.progress.train(seconds, speed)
        trained = seconds - stalled
        self.lost[Loss.CHECKPOINTS] += stalled
        self.lost[Loss.SMALLER] += trained * (1 - speed)
        self.lost[Loss.OVERHEAD] += trained * speed * overhead
        self.now += seconds
        self.newest = max(self.newest, self.progress.step)

    def wait(self, until: float, spent: list[tuple[Loss, float]]) -> None:
        """Let time pass without training; spent: the causes, in the order of time."""
        for loss, seconds in spent:
            counted = min(seconds, self.end - self.now)
            self.lost[loss] += counted
            self.now += counted
        self.now = min(until, self.end)  # the sum of many spans has a rounding error

    def fall_back(self, source: Source, *, before: int | None = None) -> float:
        """Continue from another state, or a checkpoint before this step; return the work lost."""
        if before is None:
            lost = self.progress.fall_back(source)
        else:
            lost = self.progress.roll_back(before)
        self.lost[Loss.REDONE] += lost
        return lost

    def move(self, place: int, repair_s: float, *, alone: bool) -> float:
        """Give the place of a node that needs repair to another; return when that node is ready.

        alone: see `Pool.lose`.
        """
        warm = self.pool.free(self.now) > 0
        self._leave(place, repair_s, alone=alone)
        at = self.pool.take(self.now)
        return at if warm else at + self._setting.costs.job.new_node_s

    def leave_out(self, place: int, repair_s: float, *, alone: bool) -> None:
        """Continue without a node that needs repair until another node arrives."""
        self._leave(place, repair_s, alone=alone)
        self.do_without(place, self.pool.take(self.now) + self._setting.costs.job.new_node_s)

    def do_without(self, place: int, until: float) -> None:
        """Continue without a node for this place until the given time."""
        self.missing.add(place)
        heapq.heappush(self._coming, (until, place))

    def grow(self) -> None:
        """Add a node that has arrived, between two steps.

        The other nodes lose their current step.
        """
        _, place = heapq.heappop(self._coming)
        self.missing.discard(place)
        self.fall_back(Source.LIVE)
        seconds = self._setting.costs.job.grow_s
        self.wait(self.now + seconds, [(Loss.RECOVERING, seconds)])

    def _leave(self, place: int, repair_s: float, *, alone: bool) -> None:
        self.pool.lose(self.now, repair_s, alone=alone)
        self._tenants[place] += 1
