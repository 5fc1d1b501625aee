"""What ranks wait for besides their own work: data, saves, links between them. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Mapping

from rekindle.profiling.compute_time import FLOOR, faster, sure
from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.noise import own_noise
from rekindle.profiling.series import BASELINE, Level, Series
from rekindle.profiling.steps import StepTimes

LEAST_LINK = math.log(1.3)  # collectives vary with all that goes over the network
SHARE = 0.05  # of a step that waiting for data or saving must cost
COST = 0.01  # of all steps that longer saves must cost: they come seldom


def _take(series: Series, step: int, value: float) -> None:
    """Nobody else's figure tells about this one."""
    series.add(step, value)
    series.settle()
    if series.has_fallen() and series.has_fallen(own_noise(series.sample())):
        series.settle_anew()


class Loading:
    """Ranks that wait longer for their batches."""

    def __init__(self) -> None:
        self._ranks: dict[int, Series] = defaultdict(Series)

    def forget(self, ranks: Collection[int]) -> None:
        """Nothing is known about these."""
        for rank in ranks:
            self._ranks.pop(rank, None)

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Take a step of all ranks; return whose loading is slow. usual: what a step takes."""
        found, certain = [], sure(len(times))
        for rank, each in times.items():
            series = self._ranks[rank]
            # It may be nothing, of which there is no logarithm: so parts of a step.
            _take(series, step, each.loading / usual)
            shift = series.shift(SHARE, certain)
            if shift is not None:
                shift = series.shift(SHARE, certain, own_noise(series.sample(shift.since)))
            if shift is not None:
                before = max(shift.before, FLOOR)
                found.append(
                    Finding(
                        kind=Slow.LOADING,
                        ranks=(rank,),
                        factor=round((before + shift.height) / before, 3),
                        since=shift.since,
                        found=step,
                        cost=round(min(shift.height / (1 + shift.height), 1.0), 3),
                    )
                )
        return found


class Saving:
    """Ranks whose saves take longer."""

    def __init__(self) -> None:
        # The newest saves of each rank, each with the number of steps since the one before.
        self._ranks: dict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=BASELINE)
        )
        self._steps: dict[int, int] = defaultdict(int)  # since the newest one
        self._before: dict[int, float] = {}  # what they took until they became slow

    def forget(self, ranks: Collection[int]) -> None:
        """Nothing is known about these."""
        for rank in ranks:
            for each in (self._ranks, self._steps, self._before):
                each.pop(rank, None)

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Return whose saves are slow, of those that have saved in this step.

        Saves are few: three in a row that take twice as long as the ones before are enough, if
        that is something beside the steps between them. One that takes no longer is the end of it.
        """
        found = []
        for rank, each in times.items():
            self._steps[rank] += 1
            if not each.saving:
                continue
            saves = self._ranks[rank]
            saves.append((self._steps.pop(rank), each.saving))
            before, now = self._before.get(rank), each.saving
            if before is None and len(saves) >= 6:
                before = statistics.median([seconds for _, seconds in saves][:-3])
                now = min([seconds for _, seconds in saves][-3:])
            if before is None:
                continue
            lost = now - before
            steps = statistics.fmean([steps for steps, _ in saves][-3:])
            cost = lost / (steps * usual + now)
            if now > 2 * before and lost > SHARE * usual and cost > COST:
                self._before[rank] = before
                found.append(
                    Finding(
                        kind=Slow.SAVING,
                        ranks=(rank,),
                        factor=round(now / max(before, FLOOR), 3),
                        since=step,
                        found=step,
                        cost=round(cost, 3),
                    )
                )
            else:
                self._before.pop(rank, None)
        return found


class Links:
    """Groups whose collectives take longer, also him who joins them last, and waits for nobody.

    Which of a group's links it is, they do not tell.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Series] = defaultdict(Series)
        self._members: dict[str, set[int]] = defaultdict(set)  # ranks that have been in a group
        self._load = Level()  # the work of all

    def clear(self) -> None:
        """Forget what was usual."""
        self._groups.clear()
        self._load = Level()

    def forget(self, ranks: Collection[int]) -> None:
        """Forget the groups that these ranks are in: their links are other ones."""
        for group in [g for g, members in self._members.items() if members & set(ranks)]:
            self._groups.pop(group, None)
            del self._members[group]

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Take a step of all ranks; return whose collectives are slow."""
        there: dict[str, dict[int, tuple[float, ...]]] = defaultdict(dict)
        for rank, its in times.items():
            for group, seconds in its.links:
                there[group][rank] = seconds
        work = faster([each.compute for each in times.values()])
        self._load.add(step, math.log(max(work, FLOOR)))
        found = []
        for group, of in there.items():
            self._members[group] |= of.keys()
            if len(of) < max(2, len(self._members[group])) or len(set(map(len, of.values()))) > 1:
                continue
            # Who comes last may be another one in each collective.
            took = max(sum(map(min, zip(*of.values(), strict=True))), FLOOR)
            _take(self._groups[group], step, math.log(took))
            each = self._slow(group, sorted(of), sure(len(there)), step, usual)
            found += [each] if each is not None and each.cost > SHARE else []
        return found

    def _slow(
        self, group: str, ranks: list[int], certain: float, step: int, usual: float
    ) -> Finding | None:
        series = self._groups[group]
        shift = series.shift(LEAST_LINK, certain)
        if shift is not None:
            shift = series.shift(LEAST_LINK, certain, own_noise(series.sample(shift.since)))
        if shift is None:
            return None
        if self._load.rose(shift.since, shift.height / 2):  # longer batches are more to send, too
            if series.lasts(shift):
                series.settle_anew()
            return None
        factor = math.exp(shift.height)
        return Finding(
            kind=Slow.LINK,
            ranks=tuple(ranks),
            factor=round(factor, 3),
            since=shift.since,
            found=step,
            cost=round(min(math.exp(shift.before) * (factor - 1) / usual, 1.0), 3),
            group=group,
        )
