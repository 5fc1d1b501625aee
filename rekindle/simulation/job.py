"""The simulated job: its time, its progress, its nodes and spares."""

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
    """The nodes beside those that train; times in seconds since the job began.

    spares: None: as many as there ever have to be. Nodes and spares are all that there is: a node
    that is left comes back as a spare once it is mended.
    """

    def __init__(self, spares: int | None) -> None:
        self._endless = spares is None
        self._ready = [-math.inf] * (spares or 0)  # when each can be used, the earliest first
        self._out: list[float] = []  # until when each node is out of use
        self._out_alone: list[float] = []  # the same of those that were not lost with their group
        self.lost = 0  # nodes in all

    def free(self, now: float) -> int:
        """Return how many spares wait."""
        if self._endless:
            return 1_000_000
        return sum(at <= now for at in self._ready)

    def out(self, now: float, *, alone: bool = False) -> int:
        """Return how many nodes are out of use; alone: those apart that were lost in groups."""
        found = self._out_alone if alone else self._out
        while found and found[0] <= now:
            heapq.heappop(found)
        return len(found)

    def lose(self, now: float, repair_s: float, *, alone: bool) -> None:
        """Take a node out of use. alone: not together with its group."""
        heapq.heappush(self._out, now + repair_s)
        if alone:
            heapq.heappush(self._out_alone, now + repair_s)
        self.lost += 1
        if not self._endless:
            heapq.heappush(self._ready, now + repair_s)

    def take(self, now: float) -> float:
        """Have the next node take a place; return when it can."""
        return now if self._endless else max(now, heapq.heappop(self._ready))


class Setting(msgspec.Struct, frozen=True):
    """All that one run depends on but its faults."""

    policy: Policy
    world: World
    costs: Costs
    cadence: Cadence


class Job:
    """What happens to it is told from outside. Times in seconds since it began.

    newest, resumed: as in `recovery.policy.history.Situation`. missing: places that the world goes
    on without. lost: where the time went that was worth nothing.
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
        self._tenants = Counter[int]()  # how often each place was given to another node
        self._coming: list[tuple[float, int]] = []  # when somebody comes for a missing place

    @property
    def is_over(self) -> bool:
        """Whether the time to be simulated is."""
        return self.now >= self.end

    @property
    def grows_at(self) -> float:
        """When a node comes back."""
        return self._coming[0][0] if self._coming else math.inf

    def host(self, place: int) -> str:
        """Return the name of the machine that has this place now."""
        return f"{place}.{self._tenants[place]}"

    def hit(self, strike: Strike) -> list[int]:
        """Return the places in use that a strike hits: none if it was for a lemon that has left."""
        if strike.of_lemon and self._tenants[strike.nodes[0]]:
            return []
        return [place for place in strike.nodes if place not in self.missing]

    def train(self, until: float) -> None:
        """Train up to a moment, or to the end of the simulated time."""
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
        """Let time pass without training; spent: on what, from the first to the last second."""
        for loss, seconds in spent:
            counted = min(seconds, self.end - self.now)
            self.lost[loss] += counted
            self.now += counted
        self.now = min(until, self.end)  # the sum of many spans is a little off

    def fall_back(self, source: Source, *, before: int | None = None) -> float:
        """Go on from another state, or a checkpoint before this step; return the work lost."""
        if before is None:
            lost = self.progress.fall_back(source)
        else:
            lost = self.progress.roll_back(before)
        self.lost[Loss.REDONE] += lost
        return lost

    def move(self, place: int, repair_s: float, *, alone: bool) -> float:
        """Give the place of a node that is to be repaired to another; return when that is there.

        alone: as in `Pool.lose`.
        """
        warm = self.pool.free(self.now) > 0
        self._leave(place, repair_s, alone=alone)
        at = self.pool.take(self.now)
        return at if warm else at + self._setting.costs.job.new_node_s

    def leave_out(self, place: int, repair_s: float, *, alone: bool) -> None:
        """Go on without a node that is to be repaired, until another one comes."""
        self._leave(place, repair_s, alone=alone)
        self.do_without(place, self.pool.take(self.now) + self._setting.costs.job.new_node_s)

    def do_without(self, place: int, until: float) -> None:
        """Go on without a node that comes at some time."""
        self.missing.add(place)
        heapq.heappush(self._coming, (until, place))

    def grow(self) -> None:
        """Take a node in that has come, between two steps; the others lose what they had begun."""
        _, place = heapq.heappop(self._coming)
        self.missing.discard(place)
        self.fall_back(Source.LIVE)
        seconds = self._setting.costs.job.grow_s
        self.wait(self.now + seconds, [(Loss.RECOVERING, seconds)])

    def _leave(self, place: int, repair_s: float, *, alone: bool) -> None:
        self.pool.lose(self.now, repair_s, alone=alone)
        self._tenants[place] += 1
