"""Attempts of one job in one directory; each meets several faults, the rows of a table.

A module-scoped fixture runs the attempts (`Attempts.meet`). One test per row then checks the
incident of that row, and one more test checks the end of the job: the same training as the
baseline, to the bit, the same processes but for the replaced ones, and no process left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from training_jobs import RANKS
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, held
from training_jobs.job import Job, pause_all
from training_jobs.record import Record

Act = Callable[[Job, int], Any]
IN_PLACE = (Strategy.RECOVER_IN_PLACE,)
RETRY = (Strategy.RETRY,)
NODE = (Strategy.RECOVER,)


@dataclass(frozen=True)
class Row:
    """One fault of a long job, and what must follow from it.

    name: the test's. step: the first step in which the fault can strike. Between the steps of two
        rows there are at least three steps.
    faults: the script's own. act: a function that acts on the job from outside. It gets the job and
        the number of the row's first fault (see `Job.wait_fault`), and `Ended.seen` keeps its
        result.
    strategies: all decisions, in order; None: any; empty: there is no incident.
    lost: the steps lost, or all numbers that are allowed; None: any.
    replaced: the ranks that get a new process.
    sources: of the ranks' states, in each generation or in the only one; None: any.
    check: a function that checks more when the job has ended.
    """

    name: str
    step: int
    faults: tuple[Fault, ...] = ()
    act: Act | None = None
    strategies: tuple[Strategy, ...] | None = IN_PLACE
    lost: int | Collection[int] | None = 0
    replaced: Collection[int] = ()
    sources: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None
    check: Callable[[Ended, journal.Incident], None] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass
class Ended:
    """A job, or an attempt of it, that met all rows, and how far it came.

    events: its own, without those of earlier attempts. seen: the results of the acts, by the names
    of the rows. earlier: the number of processes that each rank had in earlier attempts.
    """

    job: Job
    rows: Sequence[Row]
    error: Exception | AssertionError | None = None
    ended: journal.Ended | None = None
    events: list[journal.AnyEvent] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    story: str = ""
    earlier: list[int] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How the attempt ended; empty: it did not."""
        return self.ended.outcome if self.ended is not None else ""

    def began(self) -> tuple[int, dict[str, int]]:
        """Return the steps with which it began, and where its ranks' states came from."""
        [formed, *_] = self.of(journal.Formed)
        return formed.step, formed.sources

    @property
    def incidents(self) -> list[journal.Incident]:
        """Fold the attempt's own events."""
        return journal.incidents(self.events)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the attempt's events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def incidents_of(self, row: Row) -> list[journal.Incident]:
        """Return the incidents between a row's step and the step of the next row."""
        later = [other.step for other in self.rows if other.step > row.step]
        end = min(later, default=self.job.record.total + 1)
        return [each for each in self.incidents if row.step <= _began(each) < end]

    def events_of(self, row: Row) -> list[journal.AnyEvent]:
        """Return the events from the row's first fault to the first fault of a later row."""
        numbers = {incident.number for incident in self.incidents_of(row)}
        last = max(numbers)

        def begins(event: journal.AnyEvent, known: Callable[[int], bool]) -> bool:
            return isinstance(event, journal.FaultSeen) and known(event.incident)

        since = itertools.dropwhile(lambda e: not begins(e, numbers.__contains__), self.events)
        return list(itertools.takewhile(lambda e: not begins(e, lambda n: n > last), since))

    def check(self, row: Row) -> journal.Incident | None:
        """Check what a row promises; return its last incident."""
        found = self.incidents_of(row)
        if row.strategies == ():
            assert found == [], f"row {row}: {found}"
            assert row.name in self.seen, f"row {row}: {self.error}{self.story}"
            return None
        assert found, f"no incident of row {row}: {self.error}{self.story}"
        assert all(each.closed for each in found), f"row {row}: {self.error}{self.story}"
        if row.strategies is not None:
            assert tuple(each for i in found for each in i.strategies) == row.strategies, found
        if row.lost is not None:
            allowed = (row.lost,) if isinstance(row.lost, int) else row.lost
            assert sum(each.steps_lost for each in found) in allowed, found
        events = self.events_of(row)
        started = [e.ranks for e in events if isinstance(e, journal.RanksStarted)]
        assert set(itertools.chain(*started)) == set(row.replaced), f"row {row}: {started}"
        if row.sources is not None:
            wanted = [row.sources] if isinstance(row.sources, Mapping) else list(row.sources)
            assert [e.sources for e in events if isinstance(e, journal.Formed)] == wanted
        if row.check is not None:
            row.check(self, found[-1])
        return found[-1]

    def check_outcome(self, outcome: str = "succeeded") -> journal.Ended:
        """Check how the attempt ended, and that it left no process."""
        assert self.error is None, f"{self.error}{self.story}"
        assert self.outcome == outcome, f"{self.ended}{self.story}"
        assert self.leftovers == []
        assert self.ended is not None
        return self.ended

    def check_end(self, baseline: Record) -> None:
        """The job ended well, is the baseline to the bit, kept its processes, and left none."""
        self.check_outcome()
        assert_same_training(self.job.record, baseline)
        assert_samples_once(self.job.record)
        self.check_processes()
        assert all(incident.closed for incident in self.incidents), self.story
        expected = [each.number for row in self.rows for each in self.incidents_of(row)]
        assert [each.number for each in self.incidents] == expected, "an incident of no row"

    def check_processes(self) -> None:
        """Each rank has had one process, and one more for each start that the journal names."""
        started = [event.ranks for event in self.of(journal.RanksStarted)]
        record = self.job.record
        for rank in range(record.ranks):
            lives = record.lives(rank)[self.earlier[rank] :]
            assert len(lives) == sum(rank in ranks for ranks in started), f"rank {rank}"
            assert record.result(rank)["pid"] == lives[-1], f"rank {rank}"


def _began(incident: journal.Incident) -> int:
    """Return the steps that were finished when the incident began."""
    return incident.resumed_at + incident.steps_lost


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return the rows by their steps; rows without a distance of three steps are refused."""
    found = sorted(rows, key=lambda row: row.step)
    for first, second in itertools.pairwise(found):
        assert second.step - first.step >= 3, f"rows {first} and {second} are too near"
    return found


def killed(place: str, step: int, rank: int, others: int, **expected: Any) -> Row:
    """Return the row of a rank that dies at a place once the others have done `others` steps."""

    def release(job: Job, number: int) -> None:
        job.release_abreast(number, others)

    faults = held(Fault(rank, place, step, life=0))
    return Row(f"killed at {place}", step, faults, release, replaced={rank}, **expected)


def paused(name: str, step: int, act: Callable[[Job], Any], **expected: Any) -> Row:
    """Return a row in which all ranks pause in a step; `act` is done then, and they train on."""

    def meanwhile(job: Job, first: int) -> Any:
        job.wait_pause(step, first=first)
        seen = act(job)
        job.release_all(first)
        return seen

    faults = tuple(pause_all(step, expected.pop("ranks", RANKS), life=0))
    return Row(name, step, faults, meanwhile, **expected)


class Attempts:
    """A job whose attempts follow each other in one directory; a context manager.

    An error of an attempt is the error of all later ones, which are not started.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.job = Job(folder, **settings)
        self._error: Exception | None = None

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()

    def meet(self, *rows: Row, replaces: bool = True, **changes: Any) -> Ended:
        """Run the next attempt through its rows; `changes` are to the job's description.

        replaces: whether nodes that are wanted are brought.
        """
        self.job.replaces = replaces
        first = len(self.job.events())
        ended = Ended(self.job, in_order(rows), error=self._error)
        record = self.job.record
        ended.earlier = [len(record.lives(rank)) for rank in range(record.ranks)]
        if self._error is None:
            try:
                self._meet(ended, changes)
            except Exception as error:
                self._error = ended.error = error
            if ended.outcome != "succeeded":
                ended.story = self.job.story()
        ended.events = self.job.events()[first:]
        return ended

    def _meet(self, ended: Ended, changes: dict[str, Any]) -> None:
        self.job.plan(*(fault for row in ended.rows for fault in row.faults))
        self.job.start(**changes)
        number = 0
        for row in ended.rows:
            if row.act is not None:
                ended.seen[row.name] = row.act(self.job, number)
            number += len(row.faults)
        ended.ended = self.job.end()
        ended.leftovers = self.job.leftovers()
