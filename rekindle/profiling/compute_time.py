"""Find ranks whose own work takes longer than before, or is larger than that of others. Pure."""

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

LEAST = math.log(1.06)  # relative to the baseline; the detector ignores smaller rises
SURE = 2.2  # standard errors; `sure` adds more for a larger number of ranks
UNEVEN = math.log(1.1)  # relative to the work of the peers
Peers = Sequence[Sequence[int]]
FLOOR = 1e-4  # seconds; clocks cannot resolve less


class ComputeTime:
    """Follow the work of ranks and nodes in each step, relative to their peers.

    `peers` holds groups of ranks that do the same work. Without groups, all ranks are peers.
    `per_node` is the number of ranks of a node; the ranks of a node have consecutive numbers.
    """

    def __init__(self, peers: Peers, *, per_node: int) -> None:
        self._group_of = {rank: index for index, group in enumerate(peers) for rank in group}
        self._per_node = per_node
        self._ranks: dict[int, StepSeries] = defaultdict(StepSeries)
        self._nodes: dict[int, StepSeries] = defaultdict(StepSeries)
        # each group relative to the others
        self._groups: dict[int, StepSeries] = defaultdict(StepSeries)
        # by group: the speed of its faster half
        self._faster: dict[int, Level] = defaultdict(Level)
        self._now: dict[int, float] = {}  # each rank's work in this step, in seconds
        self._in_group: dict[int, list[int]] = {}  # ranks of each group in this step
        self._in_node: dict[int, list[int]] = {}  # ranks of each node that has more than one
        self._loaded: set[tuple[int, ...]] = set()  # ranks with uneven work in the step before
        # noise of each kind of series, computed on demand per step
        self._usual: dict[int, Noise] = {}
        self._moved: dict[int, float] = {}  # lasting move of each rank, computed on demand per step
        # the newest rise of each finding, for ranks and nodes
        self._risen: dict[tuple[int, ...], Shift] = {}

    def clear(self) -> None:
        """Clear all baselines."""
        for series in (self._ranks, self._nodes, self._groups, self._faster, self._risen):
            series.clear()

    def forget(self, ranks: Collection[int]) -> None:
        """Clear the series of these ranks and of their nodes."""
        for rank in ranks:
            self._ranks.pop(rank, None)
            self._nodes.pop(rank // self._per_node, None)
        self._risen = {key: each for key, each in self._risen.items() if not {*ranks} & {*key}}

    def add(self, step: int, work: Mapping[int, float]) -> None:
        """Add one step of all ranks."""
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

    # ---- slow ranks and nodes

    def slow(self, step: int, seconds: float, found_so: Set[tuple[int, ...]]) -> list[Finding]:
        """Return nodes all of whose ranks have become slow, and other slow ranks.

        `seconds` is the duration of the step. `found_so` holds the ranks of each finding that is
        already known.
        """
        known = {rank for ranks in found_so for rank in ranks}
        found, certain = [], sure(len(self._now))
        usual: list[StepSeries] = []  # series with a long rise that does not indicate a slow node
        for node, ranks in self._in_node.items():
            is_known = known >= set(ranks)
            shift = self._shift(self._nodes, node, tuple(ranks), certain, known=is_known)
            if shift is None:
                continue
            rises = [self._ranks[rank].rise(shift.since) for rank in ranks]
            # the ranks may have become slow at different times, so the newest steps also count
            if (*ranks,) in found_so:
                nows = [self._ranks[rank].rise_now() for rank in ranks]
                rises = list(map(max, rises, nows))
            most = sum(rise > shift.height / 2 for rise in rises) >= MOST * len(ranks)
            of_all = self._is_of_all(shift, ranks, known=is_known)
            if most and not of_all and (is_known or self._is_apart(shift, ranks)):
                found.append(self._finding(Slow.NODE, tuple(ranks), shift, step, seconds))
            elif of_all and not known & set(ranks):
                usual += [self._nodes[node]] * self._nodes[node].lasts(shift)
        named = {rank for each in found for rank in each.ranks}
        for rank in self._now:
            if rank in named:
                continue
            is_known = rank in known
            shift = self._shift(self._ranks, rank, (rank,), certain, known=is_known)
            if shift is None:
                continue
            of_all = self._is_of_all(shift, [rank], known=is_known)
            if not of_all and (is_known or self._is_apart(shift, [rank])):
                found.append(self._finding(Slow.RANK, (rank,), shift, step, seconds))
            elif of_all and not is_known:
                usual += [self._ranks[rank]] * self._ranks[rank].lasts(shift)
        for series in (*usual, *self._fallen(known, certain)):
            series.settle_anew()
        return found

    def _shift(
        self,
        of: Mapping[int, StepSeries],
        key: int,
        ranks: tuple[int, ...],
        certain: float,
        *,
        known: bool,
    ) -> Shift | None:
        """Return the rise of a series, if it is also significant for correlated steps.

        `known` means that the ranks are already known as slow. The rise then holds until the steps
        return to their earlier level.
        """
        shift = of[key].shift(LEAST, certain)
        if known:
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
        """Return the common noise of all series of a kind, from the steps before any rise."""
        if id(of) not in self._usual:
            shifts = [(each, each.shift(LEAST, certain)) for each in of.values()]
            self._usual[id(of)] = usual_noise(
                each.sample(shift.since if shift else None) for each, shift in shifts
            )
        return self._usual[id(of)]

    def _is_apart(self, shift: Shift, ranks: Sequence[int]) -> bool:
        """Return whether the rise exceeds the usual changes of other ranks.

        Other ranks change much if, for example, the work arrives in pieces.
        """
        most = [self._ranks[rank].most for rank in self._now if rank not in ranks]
        return shift.height > APART * quarter(most)

    def _is_of_all(self, shift: Shift, ranks: Sequence[int], *, known: bool) -> bool:
        """Return whether the peers became faster instead, or most others moved with these ranks.

        `known` means that the ranks are already known as slow. A few unusual steps of all ranks do
        not change that.
        """
        group = self._group_of.get(ranks[0], -1)
        if self._faster[group].rose(shift.since, shift.height / 2, MANY if known else FEW):
            return True
        others = [rank for rank in self._now if rank not in ranks]
        moves = [self._lasting(rank) if known else self._ranks[rank].move for rank in others]
        return shift.height <= APART * quarter(moves)

    def _lasting(self, rank: int) -> float:
        """Return how far a rank has lastingly moved from its baseline; cached for each step."""
        if rank not in self._moved:
            self._moved[rank] = self._ranks[rank].lasting_move()
        return self._moved[rank]

    def _fallen(self, known: Set[int], certain: float) -> Iterator[StepSeries]:
        """Yield series that have been below their baseline for long.

        The result omits groups in which most ranks are slow, because such ranks are not a
        reference.
        """
        slow = {
            group
            for group, ranks in self._in_group.items()
            if 2 * len(known & set(ranks)) > len(ranks)
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

    # ---- uneven work

    def uneven(self, step: int) -> list[Finding]:
        """Return ranks that do more than their peers, and groups that do more than others.

        A group whose ranks all have more work than before has a larger part of the model.
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
        """Return a finding if the series shows uneven work now.

        The finding ends when the newest steps do not show it, even if the baseline still does. A
        known finding holds down to half the threshold, so that a borderline one does not alternate.
        """
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
    """Return the lower quartile of moves, because many other ranks may also be slow."""
    moves.sort()
    return moves[len(moves) // 4] if len(moves) >= 3 else 0.0


def sure(ranks: int) -> float:
    """Return the number of standard errors that prevents false findings among this many ranks."""
    return SURE + math.sqrt(2 * math.log(ranks + 1))


def faster(values: list[float]) -> float:
    """Return the median of the faster half, because up to half of all peers may be slow."""
    values.sort()
    return statistics.median(values[: (len(values) + 1) // 2])
