"""One job that meets several faults, one after the other; each fault is a row of a table.

A module-scoped fixture runs the job (`run_rows`). One test per row then checks the incident of that
row, and one more test checks the end of the job: the same training as the baseline, to the bit, the
same processes but for the replaced ones, and no process left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from training_jobs.injection import Fault
from training_jobs.job import Job

Act = Callable[[Job, int], None]


@dataclass(frozen=True)
class Row:
    """One fault of a long job, and what must follow from it.

    name: of the test. step: the first step in which the fault can strike; rows are in the order of
        their steps, with at least three steps between them.
    faults: what the ranks inflict upon themselves. act: what is done from outside meanwhile; it
        gets the job and the number of the row's first fault (see `Job.wait_fault`).
    strategies: what must be decided, in order. lost: the steps lost, or the numbers allowed.
    replaced: the ranks that have a new process afterwards.
    sources: where the ranks' states come from; None: not checked.
    check: more to check, once the job has ended.
    """

    name: str
    step: int
    faults: tuple[Fault, ...] = ()
    act: Act | None = None
    strategies: tuple[Strategy, ...] = (Strategy.RECOVER_IN_PLACE,)
    lost: int | Collection[int] = 0
    replaced: frozenset[int] = frozenset()
    sources: dict[str, int] | None = None
    check: Callable[[Ended, journal.Incident], None] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass
class Ended:
    """A job that met all rows, and how far it came."""

    job: Job
    rows: Sequence[Row]
    error: Exception | AssertionError | None = None
    incidents: list[journal.Incident] = field(default_factory=list)

    def incidents_of(self, row: Row) -> list[journal.Incident]:
        """Return the incidents between a row's step and the step of the next row."""
        later = [other.step for other in self.rows if other.step > row.step]
        end = min(later, default=self.job.record.total + 1)
        return [each for each in self.incidents if row.step <= _began(each) < end]

    def check(self, row: Row) -> journal.Incident:
        """Check what a row promises; return its last incident."""
        found = self.incidents_of(row)
        story = self.job.story() if not found or not found[-1].closed else ""
        assert found, f"no incident of row {row}: {self.error}{story}"
        assert all(each.closed for each in found), f"row {row}: {self.error}{story}"
        decided = tuple(strategy for each in found for strategy in each.strategies)
        assert decided == row.strategies, found
        lost = sum(each.steps_lost for each in found)
        assert lost in ((row.lost,) if isinstance(row.lost, int) else row.lost), found
        if row.sources is not None:
            assert found[-1].sources == row.sources, found
        if row.check is not None:
            row.check(self, found[-1])
        return found[-1]

    @property
    def replaced(self) -> set[int]:
        """All ranks that have a new process at the end."""
        return {rank for row in self.rows for rank in row.replaced}


def _began(incident: journal.Incident) -> int:
    """Return the steps that were finished when the incident began."""
    return incident.resumed_at + incident.steps_lost


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return the rows by their steps; rows without a distance of three steps are refused."""
    found = sorted(rows, key=lambda row: row.step)
    for first, second in itertools.pairwise(found):
        assert second.step - first.step >= 3, f"rows {first} and {second} are too near"
    return found


def run_rows(folder: Path, rows: Iterable[Row], **settings: object) -> Ended:
    """Run one job through all rows; an error of the job is kept for the tests of its rows."""
    ordered = in_order(rows)
    faults = [fault for row in ordered for fault in row.faults]
    job = Job(folder, *faults, **settings)
    ended = Ended(job, ordered)
    with job.start():
        try:
            number = 0
            for row in ordered:
                if row.act is not None:
                    row.act(job, number)
                number += len(row.faults)
            job.end()
        except Exception as error:
            ended.error = error
        ended.incidents = job.incidents()
    return ended
