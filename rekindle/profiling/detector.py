"""Finds slow ranks from their steps, all at once or while they come. Pure, fast for any world.

A rank is compared with its peers, and with itself: first its work is put in relation to that of the
faster peers in the same step, so that what all share (a long batch, a slow step) is not seen; then
that relation to what it was in its baseline. Whoever has had more work since the records began, as
the last stage of a pipeline has, or a rank with the longer sequences, is not slow but loaded
unevenly, and nobody is sent away for that. How sure it must be follows from how much its steps
vary, and take after each other.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

import msgspec

from rekindle.profiling.compute_time import FLOOR, ComputeTime, Peers, faster, sure
from rekindle.profiling.findings import Book, Finding, Slow
from rekindle.profiling.series import BASELINE, Level, StepSeries, own_noise
from rekindle.profiling.steps import StepTimes

LEAST_LINK = math.log(1.3)  # collectives vary with all that goes over the network
SHARE = 0.05  # of a step that waiting for data or saving must cost
COST = 0.01  # of all steps that longer saves must cost: they come seldom


def _take(series: StepSeries, step: int, value: float) -> None:
    """Nobody else's figure tells about this one."""
    series.add(step, value)
    series.settle()
    if series.has_fallen() and series.has_fallen(own_noise(series.sample())):
        series.settle_anew()


class Loading:
    """Ranks that wait longer for their batches."""

    def __init__(self) -> None:
        self._ranks: dict[int, StepSeries] = defaultdict(StepSeries)

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
        self._groups: dict[str, StepSeries] = defaultdict(StepSeries)
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


# Steps in a row without collectives after which they are not recorded any more: who reduces
# gradients only in every fourth step has some as well.
UNRECORDED = 20
RECORDED = 2  # of so many with some: they are recorded from now on


class Detector:
    """Reads steps as they come.

    peers: ranks that do the same work, each in one group; without any all are peers.
    per_node: ranks of a node, which are numbered one after the other.
    """

    def __init__(self, peers: Peers = (), *, per_node: int = 1) -> None:
        self._work = ComputeTime(peers, per_node=per_node)
        self._loading, self._saving, self._links = Loading(), Saving(), Links()
        self._recorded: bool | None = None  # whether collectives are
        self._with_some: deque[bool] = deque(maxlen=UNRECORDED)  # whether the newest steps had any
        # Steps without any where they are recorded, until it is known why.
        self._waiting: list[tuple[int, Mapping[int, StepTimes]]] = []
        self._seconds: deque[float] = deque(maxlen=BASELINE)
        self._book = Book()

    @property
    def findings(self) -> list[Finding]:
        """What is slow now."""
        return self._book.findings

    def forget(self, ranks: Collection[int]) -> None:
        """These are other ones from now on, on other nodes; nothing is known about them."""
        for each in (self._work, self._loading, self._saving, self._links, self._book):
            each.forget(ranks)
        self._waiting.clear()

    def add(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        """Take one step of all ranks; return what is found new in it."""
        if not times:
            return []
        some = any(each.waiting or each.links for each in times.values())
        self._with_some.append(some)
        if self._recorded is None:
            self._recorded = some
        elif some and not self._recorded and sum(self._with_some) >= RECORDED:
            self._begin_anew(True)
        elif self._recorded and not some:
            self._waiting.append((step, times))
            if len(self._waiting) < UNRECORDED:
                return []
            self._begin_anew(False)
            self._waiting, waiting = [], self._waiting
            return [found for each in waiting for found in self._judge(*each)]
        waiting, self._waiting = [*self._waiting, (step, times)], []
        return [found for each in waiting for found in self._judge(*each)]

    def _begin_anew(self, recorded: bool) -> None:
        """Forget what was usual when records of collectives begin or end: work is another figure.

        With them a rank's own work is known. Without, it is the step, in which who is early waits
        for the others, for their batches too.
        """
        self._recorded = recorded
        self._work.clear()
        self._links.clear()
        self._book.keep(Slow.LOADING, Slow.SAVING)

    def _judge(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        self._seconds.append(statistics.median(each.seconds for each in times.values()))
        usual = max(statistics.median(self._seconds), FLOOR)
        self._work.add(
            step, {r: each.compute if self._recorded else each.own for r, each in times.items()}
        )
        told = {each.ranks for each in self.findings if each.kind in (Slow.RANK, Slow.NODE)}
        seconds = max(each.seconds for each in times.values())
        found = [
            *self._work.slow(step, seconds, told),
            *self._loading.slow(step, times, usual),
            *self._saving.slow(step, times, usual),
            *self._links.slow(step, times, usual),
            *self._work.uneven(step),
        ]
        saved = {rank for rank, each in times.items() if each.saving}
        return self._book.note(found, times, saved)


# Steps of which some ranks have not told yet. They write every few seconds, not all at once.
MOST_PENDING = 4096
_Key = tuple[Slow, tuple[int, ...]]


class OnlineDetector:
    """Puts together what ranks tell, step by step, and says what is new; each finding once.

    ranks: all of the world; steps that one of them does not tell of are passed over. peers: groups
    of ranks that do the same work, as far as they are known.
    """

    def __init__(self, ranks: Collection[int], *, per_node: int, peers: Peers = ()) -> None:
        self._ranks = frozenset(ranks)
        self._detector = Detector(peers, per_node=per_node)
        self._pending: dict[int, dict[int, StepTimes]] = {}
        self._last = -1
        self._told: dict[_Key, Finding] = {}
        self._away: dict[_Key, int] = {}  # findings that are not seen any more: for so many steps

    @property
    def holding(self) -> list[Finding]:
        """What was told, and is not over."""
        return list(self._told.values())

    def change(self, ranks: Collection[int], others: Collection[int]) -> None:
        """The world is of these from now on; of them, others are on nodes that are new.

        Nothing that was known of those holds for them, and all that was of the rest does.
        """
        gone = {*others, *(self._ranks - frozenset(ranks))}
        self._ranks = frozenset(ranks)
        self._detector.forget(gone)
        self._told = {key: each for key, each in self._told.items() if not gone & set(each.ranks)}
        self._away = {key: steps for key, steps in self._away.items() if key in self._told}
        self._pending.clear()

    def go_back(self, step: int) -> None:
        """Training goes on behind this step, which may have been passed before."""
        self._pending.clear()
        self._last = step

    def add(self, told: Mapping[int, Iterable[StepTimes]]) -> tuple[list[Finding], list[Finding]]:
        """Take what some ranks tell; return what is found new in it, and what is over."""
        for rank, steps in told.items():
            for times in steps if rank in self._ranks else ():
                if times.step > self._last:
                    self._pending.setdefault(times.step, {})[rank] = times
        found: list[Finding] = []
        over: list[Finding] = []
        for step in sorted(self._pending):
            if len(self._pending[step]) == len(self._ranks):
                self._last = step
                found += self._judge(step, self._pending.pop(step), over)
        for step in sorted(self._pending)[: max(0, len(self._pending) - MOST_PENDING)]:
            del self._pending[step]
        self._pending = {s: each for s, each in self._pending.items() if s > self._last}
        return _together(found), _together(over)

    def _judge(
        self, step: int, times: Mapping[int, StepTimes], over: list[Finding]
    ) -> list[Finding]:
        new = [
            found
            for found in self._detector.add(step, times)
            if (found.kind, found.ranks) not in self._told
        ]
        self._told |= {(found.kind, found.ranks): found for found in new}
        seen = {(found.kind, found.ranks) for found in self._detector.findings}
        for key in list(self._told):
            self._away[key] = 0 if key in seen else self._away.get(key, 0) + 1
            if self._away[key] >= BASELINE:  # one that is hardly there comes and goes
                over.append(self._told.pop(key))
                del self._away[key]
        return new


def _together(found: list[Finding]) -> list[Finding]:
    """Return uneven work since the same step as one finding: many ranks may have it, and nothing is
    done about it."""
    others = [each for each in found if each.kind is not Slow.UNEVEN]
    uneven: dict[int, list[Finding]] = {}
    for each in found:
        if each.kind is Slow.UNEVEN:
            uneven.setdefault(each.since, []).append(each)
    for alike in uneven.values():
        ranks = tuple(sorted({rank for each in alike for rank in each.ranks}))
        most = max(alike, key=lambda each: each.factor)
        others.append(msgspec.structs.replace(most, ranks=ranks))
    return others
