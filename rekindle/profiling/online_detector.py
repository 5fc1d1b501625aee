"""How fast a job's ranks are while it trains, and who has become slow meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from rekindle.profiling.compute_time import Peers
from rekindle.profiling.detector import Detector
from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.series import BASELINE
from rekindle.profiling.steps import StepTimes

# Steps of which some ranks have not told yet. They write every few seconds, not all at once.
MOST_PENDING = 4096
_Key = tuple[Slow, tuple[int, ...]]


class Pace:
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
