"""Who has become slow, told from what ranks did in each step. Pure, and fast enough for any world.

A rank is compared with its peers, and with itself: first its work is put in relation to that of the
faster peers in the same step, so that what all share (a long batch, a slow step) is not seen; then
that relation to what it was in its baseline. Whoever has had more work from the start, as the last
stage of a pipeline has, or a rank with the longer sequences, is not slow but loaded unevenly, and
nobody is sent away for that. How sure it must be follows from how much its steps vary.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec

from rekindle.profiling.series import BASELINE, MOST, Series, Shift
from rekindle.profiling.steps import StepTimes

LEAST = 1.06  # times of what it was: below that nobody is slow
LEAST_LINK = 1.3  # the same, of collectives: they vary with all that goes over the network
SURE = 2.2  # standard errors, and more of them the more ranks there are to be wrong about
APART = 1.5  # times what others have ever moved by themselves
HOLDS = 3  # steps that something must be seen in, one after the other
SHARE = 0.05  # of a step that waiting for data or saving must cost
_FLOOR = 1e-4  # seconds that no clock tells apart


class Slow(str, enum.Enum):
    """What is slow."""

    RANK = "slow-rank"
    NODE = "slow-node"
    LINK = "slow-link"
    LOADING = "slow-data-loading"
    SAVING = "slow-checkpoint-storage"
    UNEVEN = "uneven-work"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs steps their time.

    factor: how many times as long as before, or, of uneven work, as its peers. since: the step that
    it began with; found: the one that it was told in. cost: share of the steps' time that it costs.
    group: whose collectives are slow, of a link.
    """

    kind: Slow
    ranks: tuple[int, ...]
    factor: float
    since: int
    found: int
    cost: float = 0.0
    group: str = ""

    @property
    def may_be_sick(self) -> bool:
        """Whether a node check is worth its time; because of nothing else anybody is replaced."""
        return self.kind in (Slow.RANK, Slow.NODE, Slow.LINK)


class Detector:
    """Reads steps as they come.

    peers: ranks that do the same work, each in one group; without any all are peers.
    per_node: ranks of a node, which are numbered one after the other.
    """

    def __init__(self, peers: Sequence[Sequence[int]] = (), *, per_node: int = 1) -> None:
        self._group_of = {rank: index for index, group in enumerate(peers) for rank in group}
        self._per_node = per_node
        self._work: dict[int, Series] = defaultdict(Series)
        self._nodes: dict[int, Series] = defaultdict(Series)
        self._faster: dict[int, Series] = defaultdict(Series)  # by group: how fast its faster half
        self._load = Series()  # the work of all
        self._recorded: bool | None = None  # whether collectives are
        self._loading: dict[int, Series] = defaultdict(Series)
        self._saving: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=BASELINE))
        self._links: dict[str, Series] = defaultdict(Series)
        self._members: dict[str, set[int]] = defaultdict(set)  # ranks that have been in a group
        self._seconds: deque[float] = deque(maxlen=BASELINE)
        self._open: dict[tuple[Slow, tuple[int, ...]], Finding] = {}
        self._seen: dict[tuple[Slow, tuple[int, ...]], int] = {}  # for so many steps

    @property
    def findings(self) -> list[Finding]:
        """What is slow now."""
        return list(self._open.values())

    def add(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        """Take one step of all ranks; return what is found new in it."""
        if not times:
            return []
        self._seconds.append(statistics.median(each.seconds for each in times.values()))
        usual = max(statistics.median(self._seconds), _FLOOR)
        self._begin_anew(any(each.waiting or each.links for each in times.values()))
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in times:
            groups[self._group_of.get(rank, -1)].append(rank)
        relation: dict[int, float] = {}
        for ranks in groups.values():
            work = {rank: max(self._own(times[rank]), _FLOOR) for rank in ranks}
            reference = math.log(faster(list(work.values())))
            self._faster[self._group_of.get(ranks[0], -1)].add(step, -reference)
            for rank in ranks:
                relation[rank] = math.log(work[rank]) - reference
                self._work[rank].add(step, relation[rank])
                # Waiting for data in parts of a step: it may be nothing, of which there is no log.
                self._loading[rank].add(step, times[rank].loading / usual)
                if times[rank].saving:
                    self._saving[rank].append(times[rank].saving)
        for node, ranks in self._by_node(times).items():
            self._nodes[node].add(step, statistics.median(relation[rank] for rank in ranks))
        found = [*self._slow_ranks(step, times), *self._slow_loading(step, times)]
        found += self._slow_saving(step, times, usual)
        found += self._slow_links(step, times, usual)
        found += self._uneven(step, groups)
        return self._note(found)

    def _begin_anew(self, recorded: bool) -> None:
        """Forget what was usual when records of collectives begin or end: work is another figure.

        With them a rank's own work is known. Without, it is the step, in which who is early waits
        for the others, for their batches too.
        """
        if recorded is self._recorded:
            return
        self._recorded = recorded
        for series in (self._work, self._nodes, self._links, self._faster):
            series.clear()
        self._load = Series()
        kept = (Slow.LOADING, Slow.SAVING)
        self._open = {key: found for key, found in self._open.items() if key[0] in kept}

    def _own(self, times: StepTimes) -> float:
        return times.compute if self._recorded else times.own

    # ---- each kind

    def _by_node(self, times: Mapping[int, StepTimes]) -> dict[int, list[int]]:
        """Nodes of more than one rank."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in times:
            nodes[rank // self._per_node].append(rank)
        return {node: ranks for node, ranks in nodes.items() if len(ranks) > 1}

    def _slow_ranks(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        """Nodes all of whose ranks have become slow, and else ranks."""
        found, told, sure = [], set(), _sure(len(times))
        for node, ranks in self._by_node(times).items():
            shift = self._nodes[node].shift(math.log(LEAST), sure)
            if shift is None:
                continue
            rises = [self._work[rank].rise(shift.since) for rank in ranks]
            most = sum(rise > shift.height / 2 for rise in rises) >= MOST * len(ranks)
            if most and self._is_alone(shift, ranks, times):
                found.append(self._finding(Slow.NODE, tuple(ranks), shift, step, times))
                told |= set(ranks)
        for rank in times:
            shift = None if rank in told else self._work[rank].shift(math.log(LEAST), sure)
            if shift is not None and self._is_alone(shift, [rank], times):
                found.append(self._finding(Slow.RANK, (rank,), shift, step, times))
        return found

    def _is_alone(self, shift: Shift, ranks: Sequence[int], times: Mapping[int, StepTimes]) -> bool:
        """Whether it is these that have changed: not their peers, which have become faster, nor
        all, whose work comes in long pieces that differ."""
        group = self._group_of.get(ranks[0], -1)
        if self._faster[group].rose(shift.since, shift.height / 2):
            return False
        moves = sorted(self._work[rank].most for rank in times if rank not in ranks)
        # Some of them may be slow as well, or will be: a quarter of all is not.
        return len(moves) < 3 or shift.height > APART * moves[len(moves) // 4]

    def _finding(
        self,
        kind: Slow,
        ranks: tuple[int, ...],
        shift: Shift,
        step: int,
        times: Mapping[int, StepTimes],
    ) -> Finding:
        factor = math.exp(shift.height)
        lost = max(self._own(times[rank]) * (1 - 1 / factor) for rank in ranks)
        cost = lost / max(times[ranks[0]].seconds, _FLOOR)
        return Finding(
            kind=kind,
            ranks=ranks,
            factor=round(factor, 3),
            since=shift.since,
            found=step,
            cost=round(min(cost, 1.0), 3),
        )

    def _slow_loading(self, step: int, times: Mapping[int, StepTimes]) -> list[Finding]:
        found, sure = [], _sure(len(times))
        for rank in times:
            shift = self._loading[rank].shift(SHARE, sure)
            if shift is not None:
                before = max(shift.before, _FLOOR)
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

    def _slow_links(self, step: int, times: Mapping[int, StepTimes], usual: float) -> list[Finding]:
        """Groups whose collectives take longer, also him who joins them last, and waits for nobody.

        Which of a group's links it is, they do not tell.
        """
        there: dict[str, dict[int, tuple[float, ...]]] = defaultdict(dict)
        for rank, each in times.items():
            for group, seconds in each.links:
                there[group][rank] = seconds
        work = faster([each.compute for each in times.values()])
        self._load.add(step, math.log(max(work, _FLOOR)))
        found = []
        for group, of in there.items():
            self._members[group] |= of.keys()
            if len(of) < max(2, len(self._members[group])) or len(set(map(len, of.values()))) > 1:
                continue
            # Who comes last may be another one in each collective.
            took = max(sum(map(min, zip(*of.values(), strict=True))), _FLOOR)
            self._links[group].add(step, math.log(took))
            shift = self._links[group].shift(math.log(LEAST_LINK), _sure(len(there)))
            # Longer batches are more to send as well.
            if shift is None or self._load.rose(shift.since, shift.height / 2):
                continue
            factor = math.exp(shift.height)
            cost = math.exp(shift.before) * (factor - 1) / usual
            if cost > SHARE:
                found.append(
                    Finding(
                        kind=Slow.LINK,
                        ranks=tuple(sorted(of)),
                        factor=round(factor, 3),
                        since=shift.since,
                        found=step,
                        cost=round(min(cost, 1.0), 3),
                        group=group,
                    )
                )
        return found

    def _slow_saving(
        self, step: int, times: Mapping[int, StepTimes], usual: float
    ) -> list[Finding]:
        """Saves are few: three in a row that take twice as long as the ones before are enough."""
        found = []
        for rank in times:
            saves = list(self._saving[rank])
            if not times[rank].saving or len(saves) < 6:
                continue
            before, now = statistics.median(saves[:-3]), min(saves[-3:])
            if now > 2 * before and now - before > SHARE * usual:
                found.append(
                    Finding(
                        kind=Slow.SAVING,
                        ranks=(rank,),
                        factor=round(now / max(before, _FLOOR), 3),
                        since=step,
                        found=step,
                    )
                )
        return found

    def _uneven(self, step: int, groups: Mapping[int, Sequence[int]]) -> list[Finding]:
        """Whoever has done more than its peers from the start."""
        found = []
        for ranks in groups.values():
            for rank in ranks:
                before = self._work[rank].before
                if len(ranks) > 1 and before is not None and before > math.log(1 + 2 * SHARE):
                    found.append(
                        Finding(
                            kind=Slow.UNEVEN,
                            ranks=(rank,),
                            factor=round(math.exp(before), 3),
                            since=0,
                            found=step,
                        )
                    )
        return found

    def _note(self, found: list[Finding]) -> list[Finding]:
        """Keep what holds; return what is new. Saves come seldom, and hold until the next one."""
        now = {(each.kind, each.ranks): each for each in found}
        self._seen = {key: self._seen.get(key, 0) + 1 for key in now}
        new = []
        for key, each in now.items():
            if key in self._open:
                before = self._open[key]
                now[key] = msgspec.structs.replace(each, since=before.since, found=before.found)
            elif each.kind is Slow.SAVING or self._seen[key] >= HOLDS:
                new.append(each)
        kept = {k: e for k, e in self._open.items() if k in now or e.kind is Slow.SAVING}
        self._open = {key: now.get(key, each) for key, each in kept.items()}
        self._open |= {(each.kind, each.ranks): each for each in new}
        return new


def _sure(ranks: int) -> float:
    """Return for how many standard errors one of so many is not taken for slow by chance."""
    return SURE + math.sqrt(2 * math.log(ranks + 1))


def faster(values: list[float]) -> float:
    """Return the median of the faster half: half of all peers may be slow alike."""
    values.sort()
    return statistics.median(values[: (len(values) + 1) // 2])
