"""Who has become slow, told from what ranks did in each step. Pure, and fast enough for any world.

A rank is compared with its peers, and with itself: first its work is put in relation to that of the
faster peers in the same step, so that what all share (a long batch, a slow step) is not seen; then
that relation to what it was in its baseline. Whoever has had more work since the records began, as
the last stage of a pipeline has, or a rank with the longer sequences, is not slow but loaded
unevenly, and nobody is sent away for that. How sure it must be follows from how much its steps
vary, and take after each other.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping

from rekindle.profiling.collective_time import Links, Loading, Saving
from rekindle.profiling.compute_time import FLOOR, Peers, Work
from rekindle.profiling.findings import Book, Finding, Slow
from rekindle.profiling.series import BASELINE
from rekindle.profiling.steps import StepTimes

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
        self._work = Work(peers, per_node=per_node)
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
