"""Whose own work takes longer than it did, and who has more of it than others. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.series import (
    APART,
    BASELINE,
    FEW,
    MANY,
    MOST,
    Level,
    Noise,
    Shift,
    StepSeries,
    own_noise,
    settle,
    usual_noise,
)

LEAST = math.log(1.06)  # of what it was: below that nobody is slow
SURE = 2.2  # standard errors, and more of them the more ranks there are to be wrong about
UNEVEN = math.log(1.1)  # of what its peers have to do
Peers = Sequence[Sequence[int]]
FLOOR = 1e-4  # seconds that no clock tells apart


class ComputeTime:
    """What ranks and nodes do in each step, in relation to their peers.

    peers: ranks that do the same work, each in one group; without any all are peers.
    per_node: ranks of a node, which are numbered one after the other.
    """

    def __init__(self, peers: Peers, *, per_node: int) -> None:
        self._group_of = {rank: index for index, group in enumerate(peers) for rank in group}
        self._per_node = per_node
        self._ranks: dict[int, StepSeries] = defaultdict(StepSeries)
        self._nodes: dict[int, StepSeries] = defaultdict(StepSeries)
        self._groups: dict[int, StepSeries] = defaultdict(StepSeries)  # beside each other
        self._faster: dict[int, Level] = defaultdict(Level)  # by group: how fast its faster half
        self._now: dict[int, float] = {}  # each rank's work in this step, in seconds
        self._in_group: dict[int, list[int]] = {}  # who is there in this step
        self._in_node: dict[int, list[int]] = {}  # of nodes of more than one rank
        self._loaded: set[tuple[int, ...]] = set()  # who had more to do in the step before
        self._usual: dict[int, Noise] = {}  # of the series of each kind, if this step asks for it
        self._moved: dict[int, float] = {}  # each rank's lasting move, if this step asks for it
        self._risen: dict[tuple[int, ...], Shift] = {}  # as last found, of ranks and whole nodes

    def clear(self) -> None:
        """Forget what was usual."""
        for series in (self._ranks, self._nodes, self._groups, self._faster, self._risen):
            series.clear()

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks, and the nodes that they are on."""
        for rank in ranks:
            self._ranks.pop(rank, None)
            self._nodes.pop(rank // self._per_node, None)
        self._risen = {key: each for key, each in self._risen.items() if not {*ranks} & {*key}}

    def add(self, step: int, work: Mapping[int, float]) -> None:
        """Take one step of all ranks."""
        self._now = {rank: max(seconds, FLOOR) for rank, seconds in work.items()}
        self._usual.clear()
        self._moved.clear()
        self._in_group, self._in_node = defaultdict(list), defaultdict(list)
        for rank in work:
            self._in_group[self._group_of.get(rank, -1)].append(rank)
            self._in_node[rank // self._per_node].append(rank)
        self._in_node = {node: ranks for node, ranks in self._in_node.items() if len(ranks) > 1}
        references, relation = {}, {}
        for group, ranks in self._in_group.items():
            references[group] = math.log(faster([self._now[rank] for rank in ranks]))
            self._faster[group].add(step, -references[group])
            for rank in ranks:
                relation[rank] = math.log(self._now[rank]) - references[group]
                self._ranks[rank].add(step, relation[rank])
        for node, ranks in self._in_node.items():
            self._nodes[node].add(step, statistics.median(relation[rank] for rank in ranks))
        least = faster(list(references.values()))
        for group, reference in references.items():
            self._groups[group].add(step, reference - least)
        settle(self._ranks, work)
        settle(self._nodes, self._in_node)
        settle(self._groups, references)

    # ---- slow

    def slow(self, step: int, seconds: float, found_so: Set[tuple[int, ...]]) -> list[Finding]:
        """Return nodes all of whose ranks have become slow, and else ranks.

        seconds: that the step took; found_so: the ranks of each that is known to be slow.
        """
        told = {rank for ranks in found_so for rank in ranks}
        found, certain = [], sure(len(self._now))
        usual: list[StepSeries] = []  # what has risen for long, and blames no node
        for node, ranks in self._in_node.items():
            known = told >= set(ranks)
            shift = self._shift(self._nodes, node, tuple(ranks), certain, told=known)
            if shift is None:
                continue
            rises = [self._ranks[rank].rise(shift.since) for rank in ranks]
            if (*ranks,) in found_so:  # they may not have become slow together: what they are
                nows = [self._ranks[rank].rise_now() for rank in ranks]
                rises = list(map(max, rises, nows))
            most = sum(rise > shift.height / 2 for rise in rises) >= MOST * len(ranks)
            of_all = self._is_of_all(shift, ranks, told=known)
            if most and not of_all and (known or self._is_apart(shift, ranks)):
                found.append(self._finding(Slow.NODE, tuple(ranks), shift, step, seconds))
            elif of_all and not told & set(ranks):
                usual += [self._nodes[node]] * self._nodes[node].lasts(shift)
        named = {rank for each in found for rank in each.ranks}
        for rank in self._now:
            if rank in named:
                continue
            known = rank in told
            shift = self._shift(self._ranks, rank, (rank,), certain, told=known)
            if shift is None:
                continue
            of_all = self._is_of_all(shift, [rank], told=known)
            if not of_all and (known or self._is_apart(shift, [rank])):
                found.append(self._finding(Slow.RANK, (rank,), shift, step, seconds))
            elif of_all and not known:
                usual += [self._ranks[rank]] * self._ranks[rank].lasts(shift)
        for series in (*usual, *self._fallen(told, certain)):
            series.settle_anew()
        return found

    def _shift(
        self,
        of: Mapping[int, StepSeries],
        key: int,
        ranks: tuple[int, ...],
        certain: float,
        *,
        told: bool,
    ) -> Shift | None:
        """Return its rise, if it is one for steps that take after each other as well.

        told: it was, and is so until steps are what they were.
        """
        shift = of[key].shift(LEAST, certain)
        if told:
            before = self._risen.get(ranks)
            held = shift is None and before is not None and of[key].holds(before)
            return before if held else shift
        if shift is None:
            return None
        own, usual = own_noise(of[key].sample(shift.since)), self._noise(of, certain)
        if own.swing(BASELINE) > usual.swing(BASELINE):
            usual = Noise(own.share, own.memory, usual.spread)
        return of[key].shift(LEAST, certain, usual)

    def _noise(self, of: Mapping[int, StepSeries], certain: float) -> Noise:
        """Return what all series of a kind have in common, of as long as they are as they were."""
        if id(of) not in self._usual:
            shifts = [(each, each.shift(LEAST, certain)) for each in of.values()]
            self._usual[id(of)] = usual_noise(
                each.sample(shift.since if shift else None) for each, shift in shifts
            )
        return self._usual[id(of)]

    def _is_apart(self, shift: Shift, ranks: Sequence[int]) -> bool:
        """Whether others do not change as much by themselves, as where work comes in pieces."""
        most = [self._ranks[rank].most for rank in self._now if rank not in ranks]
        return shift.height > APART * quarter(most)

    def _is_of_all(self, shift: Shift, ranks: Sequence[int], *, told: bool) -> bool:
        """Whether their peers have become faster instead, or most others have moved with them.

        told: they are known to be slow, and a few odd steps of all do not change that.
        """
        group = self._group_of.get(ranks[0], -1)
        if self._faster[group].rose(shift.since, shift.height / 2, MANY if told else FEW):
            return True
        others = [rank for rank in self._now if rank not in ranks]
        moves = [self._lasting(rank) if told else self._ranks[rank].move for rank in others]
        return shift.height <= APART * quarter(moves)

    def _lasting(self, rank: int) -> float:
        """Return how far a rank has been from its baseline for some time: all ask that of all."""
        if rank not in self._moved:
            self._moved[rank] = self._ranks[rank].lasting_move()
        return self._moved[rank]

    def _fallen(self, told: Set[int], certain: float) -> Iterator[StepSeries]:
        """Yield what has been below its baseline for long; but not where most peers are slow, who
        are no measure."""
        slow = {
            group
            for group, ranks in self._in_group.items()
            if 2 * len(told & set(ranks)) > len(ranks)
        }
        for of, there in (
            (self._ranks, {rank: self._group_of.get(rank, -1) for rank in self._now}),
            (self._nodes, {n: self._group_of.get(r[0], -1) for n, r in self._in_node.items()}),
            (self._groups, dict.fromkeys(self._in_group, None)),
        ):
            for key, group in there.items():
                if group not in slow and of[key].has_fallen():
                    if of[key].has_fallen(self._noise(of, certain)):
                        yield of[key]

    def _finding(
        self, kind: Slow, ranks: tuple[int, ...], shift: Shift, step: int, seconds: float
    ) -> Finding:
        self._risen[ranks] = shift
        factor = math.exp(shift.height)
        lost = max(self._now[rank] * (1 - 1 / factor) for rank in ranks)
        return Finding(
            kind=kind,
            ranks=ranks,
            factor=round(factor, 3),
            since=shift.since,
            found=step,
            cost=round(min(lost / max(seconds, FLOOR), 1.0), 3),
        )

    # ---- uneven

    def uneven(self, step: int) -> list[Finding]:
        """Return who does more than its peers, and groups that do more than others.

        A group whose ranks all have more to do than before has a larger part of the model.
        """
        found = []
        for ranks in self._in_group.values():
            for rank in ranks if len(ranks) > 1 else ():
                found += self._more_than_others((rank,), self._ranks[rank], step)
        for group, ranks in self._in_group.items():
            series = self._groups[group]
            shift = series.shift(LEAST, sure(len(self._in_group)))
            if shift is not None and shift.height > UNEVEN:
                found.append(_more((*ranks,), shift.height, shift.since, step))
                if series.lasts(shift):
                    series.settle_anew()
            else:
                found += self._more_than_others((*ranks,), series, step)
        self._loaded = {each.ranks for each in found}
        return found

    def _more_than_others(
        self, ranks: tuple[int, ...], series: StepSeries, step: int
    ) -> list[Finding]:
        """It is over when it is not seen any more, also where the baseline does not know that yet;
        and what is hardly there does not come and go."""
        if series.before is None or series.before <= UNEVEN:
            return []
        level = series.level()
        if series.is_above(UNEVEN) or (ranks in self._loaded and level > UNEVEN / 2):
            return [_more(ranks, level, series.began, step)]
        return []


def _more(ranks: tuple[int, ...], height: float, since: int, step: int) -> Finding:
    factor = round(math.exp(height), 3)
    return Finding(kind=Slow.UNEVEN, ranks=ranks, factor=factor, since=since, found=step)


def quarter(moves: list[float]) -> float:
    """Return how far a quarter of them has not moved: so many may be slow as well, or will be."""
    moves.sort()
    return moves[len(moves) // 4] if len(moves) >= 3 else 0.0


def sure(ranks: int) -> float:
    """Return for how many standard errors one of so many is not taken for slow by chance."""
    return SURE + math.sqrt(2 * math.log(ranks + 1))


def faster(values: list[float]) -> float:
    """Return the median of the faster half: half of all peers may be slow alike."""
    values.sort()
    return statistics.median(values[: (len(values) + 1) // 2])
