"""Find slow ranks from their steps, all together or as they arrive. Pure, fast for any world.

The detector compares a rank with its peers and with itself. First it divides the work of a rank by
that of the faster peers in the same step. This removes effects that all ranks share, such as a long
batch or a slow step. Then it compares the ratio with its baseline. A rank that has had more work
since the records began has uneven work. Examples are the last stage of a pipeline, or a rank with
longer sequences. Such a rank is not slow, and no node is replaced because of it. The required
certainty follows from the variance and the correlation of the steps.
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

LEAST_LINK = math.log(1.3)  # the times of collectives vary with all other traffic of the network
SHARE = 0.05  # smaller costs of loading or saving do not count, as a share of a step
COST = 0.01  # smaller costs of longer saves do not count, as a share of all steps; saves are rare

# After this number of consecutive steps without collectives, recording is off. A rank that reduces
# gradients only in every fourth step still has some in this number of steps.
UNRECORDED = 20
RECORDED = 2  # with collectives in this number of the newest steps, recording is on

# Steps for which some ranks have not reported yet. Ranks write every few seconds, at different
# times.
MOST_PENDING = 4096
# A rank or a link that has become this many times slower since its report is reported again. Causes
# of slowness that justify a replacement start at this factor.
GROWN = 1.3
_Key = tuple[Slow, tuple[int, ...]]


def _take(series: StepSeries, step: int, value: float) -> None:
    """Add a value to a series whose baseline does not depend on other series."""
    series.add(step, value)
    series.settle()
    if series.has_fallen() and series.has_fallen(own_noise(series.sample())):
        series.settle_anew()


class Loading:
    """Find ranks that wait longer for their batches."""

    def __init__(self) -> None:
        self._ranks: dict[int, StepSeries] = defaultdict(StepSeries)

    def forget(self, ranks: Collection[int]) -> None:
        """Clear the series of these ranks."""
        for rank in ranks:
            self._ranks.pop(rank, None)

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Add a step of all ranks; return ranks with slow loading. `usual`: the usual step time."""
        found, certain = [], sure(len(times))
        for rank, each in times.items():
            series = self._ranks[rank]
            # The value is a share of the step, because zero has no logarithm.
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
    """Find ranks whose saves take longer."""

    def __init__(self) -> None:
        # The newest saves of each rank, each with the number of steps since the previous save.
        self._ranks: dict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=BASELINE)
        )
        self._steps: dict[int, int] = defaultdict(int)  # since the newest save
        self._before: dict[int, float] = {}  # duration of saves before they became slow

    def forget(self, ranks: Collection[int]) -> None:
        """Clear the data of these ranks."""
        for rank in ranks:
            for each in (self._ranks, self._steps, self._before):
                each.pop(rank, None)

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Return ranks with slow saves, among those that have saved in this step.

        Saves are rare, so three consecutive saves that take twice as long as earlier ones are
        enough. The extra time must be relevant compared with the steps between the saves. One save
        of usual duration ends the finding.
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
    """Find groups whose collectives take longer.

    The measure is the time of the rank that joins last and does not wait for others. The records do
    not show which link of the group is slow.
    """

    def __init__(self) -> None:
        self._groups: dict[str, StepSeries] = defaultdict(StepSeries)
        self._members: dict[str, set[int]] = defaultdict(set)  # ranks that have appeared in a group
        self._load = Level()  # the work of all ranks

    def clear(self) -> None:
        """Clear all baselines."""
        self._groups.clear()
        self._load = Level()

    def forget(self, ranks: Collection[int]) -> None:
        """Clear the groups of these ranks, because their links have changed."""
        for group in [g for g, members in self._members.items() if members & set(ranks)]:
            self._groups.pop(group, None)
            del self._members[group]

    def slow(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Add a step of all ranks; return groups with slow collectives."""
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
            # A different rank may join last in each collective.
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
        # longer batches also need longer transfers
        if self._load.rose(shift.since, shift.height / 2):
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


class Detector:
    """Find slow ranks, nodes, loading, saves and links in steps as they arrive.

    `peers` holds groups of ranks that do the same work. Without groups, all ranks are peers.
    `per_node` is the number of ranks of a node; the ranks of a node have consecutive numbers.
    """

    def __init__(self, peers: Peers = (), *, per_node: int = 1) -> None:
        self._work = ComputeTime(peers, per_node=per_node)
        self._loading, self._saving, self._links = Loading(), Saving(), Links()
        self._recorded: bool | None = None  # whether the ranks record collectives
        # whether each of the newest steps had collectives
        self._with_some: deque[bool] = deque(maxlen=UNRECORDED)
        # Steps without collectives while recording is on, until the reason is known.
        self._waiting: list[tuple[int, Mapping[int, StepTimes]]] = []
        self._seconds: deque[float] = deque(maxlen=BASELINE)
        self._book = Book()

    @property
    def findings(self) -> list[Finding]:
        """Return the findings that hold now."""
        return self._book.findings

    def forget(self, ranks: Collection[int]) -> None:
        """Clear the data of these ranks, because they now run on other nodes."""
        for each in (self._work, self._loading, self._saving, self._links, self._book):
            each.forget(ranks)
        self._waiting.clear()

    def add(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        """Add one step of all ranks; return its new findings."""
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
        """Clear baselines when records of collectives start or end; work changes its meaning.

        With these records, the own work of a rank is known. Without them, the step counts as work.
        A step includes the wait of a fast rank for the others, including their batches.
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
        found_so = {each.ranks for each in self.findings if each.kind in (Slow.RANK, Slow.NODE)}
        seconds = max(each.seconds for each in times.values())
        found = [
            *self._work.slow(step, seconds, found_so),
            *self._loading.slow(step, times, usual),
            *self._saving.slow(step, times, usual),
            *self._links.slow(step, times, usual),
            *self._work.uneven(step),
        ]
        saved = {rank for rank, each in times.items() if each.saving}
        return self._book.note(found, times, saved)


class OnlineDetector:
    """Combine the reports of ranks step by step, and return each finding once.

    A finding that may have a faulty node as its cause is returned again if its factor grows.

    `ranks` holds all ranks of the world; the detector skips steps that one of them does not report.
    `peers` holds the known groups of ranks that do the same work.
    """

    def __init__(self, ranks: Collection[int], *, per_node: int, peers: Peers = ()) -> None:
        self._ranks = frozenset(ranks)
        self._detector = Detector(peers, per_node=per_node)
        self._pending: dict[int, dict[int, StepTimes]] = {}
        self._last = -1
        self._holding: dict[_Key, Finding] = {}
        self._away: dict[_Key, int] = {}  # number of steps in which a finding has not been seen

    @property
    def holding(self) -> list[Finding]:
        """Return the reported findings that have not ended."""
        return list(self._holding.values())

    def change(self, ranks: Collection[int], others: Collection[int]) -> None:
        """Change the world to these ranks; `others` are those on new nodes.

        The detector clears the data of `others` and keeps the data of the remaining ranks.
        """
        gone = {*others, *(self._ranks - frozenset(ranks))}
        self._ranks = frozenset(ranks)
        self._detector.forget(gone)
        self._holding = {
            key: each for key, each in self._holding.items() if not gone & set(each.ranks)
        }
        self._away = {key: steps for key, steps in self._away.items() if key in self._holding}
        self._pending.clear()

    def go_back(self, step: int) -> None:
        """Continue after this step, which training may have passed before."""
        self._pending.clear()
        self._last = step

    def add(
        self, reports: Mapping[int, Iterable[StepTimes]]
    ) -> tuple[list[Finding], list[Finding]]:
        """Add the reports of some ranks; return new findings, and findings that have ended."""
        for rank, steps in reports.items():
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
            if (found.kind, found.ranks) not in self._holding
        ]
        present = {(found.kind, found.ranks): found for found in self._detector.findings}
        new += [
            msgspec.structs.replace(present[key], found=step)
            for key, before in self._holding.items()
            if before.may_be_sick and key in present and present[key].factor > GROWN * before.factor
        ]
        self._holding |= {(found.kind, found.ranks): found for found in new}
        for key in list(self._holding):
            self._away[key] = 0 if key in present else self._away.get(key, 0) + 1
            # this delay prevents a borderline finding from alternating
            if self._away[key] >= BASELINE:
                over.append(self._holding.pop(key))
                del self._away[key]
        return new


def _together(found: list[Finding]) -> list[Finding]:
    """Merge findings of uneven work since the same step into one.

    Many ranks may have uneven work, and it does not lead to an action.
    """
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
