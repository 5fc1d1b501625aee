"""One job that meets several faults, one after the other; each fault is a row of a table.

A `Plan` is a job: its attempts, and the rows of each. The fixture `ended_of` runs a plan once per
worker. One test per row then checks what followed from that row's fault, and one more test checks
the end of the job: the same training as the baseline, to the bit, and no process left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Strategy
from training_jobs import RANKS
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, reached
from training_jobs.job import STEPS, Job
from training_jobs.record import Record

Act = Callable[[Job, int], None]

_LAST = (Strategy.DUMP, Strategy.FAIL)  # training does not continue after these


@dataclass(frozen=True, eq=False)
class Row:
    """One fault of a long job, and what must follow from it.

    name: the id of the row's test.
    step: the first step in which the fault can strike. Rows are in the order of
        their steps, with at least three steps between them. Rows of the same step are possible if
        each of them waits for the one before it (`Fault.after`).
    faults: what the ranks inflict upon themselves. act: what is done from outside meanwhile; it
        gets the job and the number of the row's first fault (see `Job.wait_fault`).
    strategies: what must be decided, in order; empty: there is no incident; None: not checked.
    lost: the steps lost, or the numbers allowed.
    resumed: the steps finished from which training continues, or the numbers allowed; None: not
        checked.
    replaced: the ranks that have a new process afterwards; None: not checked.
    sources: where the ranks' states come from; None: not checked.
    cause: the kind of the fault that is the cause, and its rank; None: not checked.
    check: more to check, once the job has ended.
    """

    name: str
    step: int
    faults: tuple[Fault, ...] = ()
    act: Act | None = None
    strategies: tuple[Strategy, ...] | None = (Strategy.RECOVER_IN_PLACE,)
    lost: int | Collection[int] = 0
    resumed: int | Collection[int] | None = None
    replaced: Collection[int] | None = frozenset()
    sources: dict[str, int] | None = None
    cause: tuple[Kind, int] | None = None
    check: Callable[[Ended, journal.Incident], None] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def continues(self) -> bool:
        """Whether training continues after the fault."""
        return not self.strategies or self.strategies[-1] not in _LAST


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job, the faults that it meets, and its end.

    settings: what changes in the job's description from this attempt on.
    outcome, reason: how the attempt ends; the reason contains this text.
    """

    rows: tuple[Row, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    outcome: str = "succeeded"
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Plan:
    """A job with its attempts. settings: arguments of `Job`."""

    name: str
    attempts: tuple[Attempt, ...]
    variant: str = "ddp"
    ranks: int = RANKS
    steps: int = STEPS
    settings: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


EndedOf = Callable[[Plan], "Ended"]


@dataclass
class Ended:
    """A job that met all rows, and how far it came.

    events: the ledger. left: processes that lived after an attempt. ends: how the attempts ended.
    """

    job: Job
    attempts: Sequence[Attempt]
    error: Exception | AssertionError | None = None
    events: list[journal.AnyEvent] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ends: list[journal.Ended] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The rows of all attempts."""
        return [row for attempt in self.attempts for row in attempt.rows]

    def incidents_of(self, row: Row) -> list[journal.Incident]:
        """Return the incidents of a row, as far as they are between its beginning and the next's.

        Rows of the same step share an incident: it closes when a step is finished.
        """
        begin, end = self.window(row)
        within = [event for event in self.events if begin <= event.at < end]
        return [each for each in journal.incidents(within) if each.faults]

    def is_closed(self, incident: journal.Incident) -> bool:
        """Whether training continued after an incident."""
        return any(each.closed for each in self.incidents if each.number == incident.number)

    @property
    def incidents(self) -> list[journal.Incident]:
        """All incidents of the job."""
        return journal.incidents(self.events)

    def check(self, row: Row) -> journal.Incident | None:
        """Check what a row promises; return its last incident."""
        found = self.incidents_of(row)
        story = self.job.story() if self.error else ""
        assert found or row.strategies == (), f"no incident of row {row}: {self.error}{story}"
        *before, last = [self.is_closed(each) for each in found] or [row.continues]
        assert all(before), f"row {row}: {self.error}{story}"
        assert last is row.continues, f"row {row}: {self.error}{story}"
        decided = tuple(strategy for each in found for strategy in each.strategies)
        assert row.strategies in (None, decided), found
        lost = sum(each.steps_lost for each in found)
        assert lost in _allowed(row.lost), found
        if row.resumed is not None:
            assert found[-1].resumed_at in _allowed(row.resumed), found
        if row.replaced is not None:
            assert self.replaced_in(row) == set(row.replaced), found
        if row.sources is not None:
            assert found[-1].sources == row.sources, found
        if row.cause is not None:
            assert (found[-1].cause.kind, found[-1].cause.rank) == row.cause, found
        incident = found[-1] if found else None
        if row.check is not None:
            row.check(self, incident)
        return incident

    def check_end(self, baseline: Record, *, wrong: Mapping[int, int] | None = None) -> None:
        """Check how the attempts ended, and that the training is the baseline's, to the bit."""
        assert self.error is None, f"{self.error}{self.job.story()}"
        for attempt, end in zip(self.attempts, self.ends, strict=True):
            assert end.outcome == attempt.outcome, f"{end}{self.job.story()}"
            assert attempt.reason in end.reason, end
        record = self.job.record
        assert_same_training(record, baseline, wrong=wrong)
        assert_samples_once(record)
        of_rows = {each.number for row in self.rows for each in self.incidents_of(row)}
        assert of_rows == {each.number for each in self.incidents}, "an incident of no row"
        for rank in range(record.ranks):
            assert record.result(rank)["pid"] == record.lives(rank)[-1]
        assert not self.left

    def replaced_in(self, row: Row) -> set[int]:
        """Return the ranks of which a process started between a row's beginning and the next's."""
        begin, end = self.window(row)
        record = self.job.record
        return {r for r in range(record.ranks) if any(begin <= at < end for at in record.births(r))}

    @property
    def replaced(self) -> set[int]:
        """All ranks that have a new process at the end."""
        return {rank for row in self.rows for rank in row.replaced or ()}

    def window(self, row: Row) -> tuple[float, float]:
        """Return when a row began, and when the next row began or the attempt ended."""
        rows = self.rows
        number = rows.index(row)
        ends = [self._begin(later) for later in rows[number + 1 :]]
        begin = self._begin(row)
        return begin, min(
            [*ends, *(each.at for each in self.ends if each.at >= begin)], default=_FAR
        )

    def _begin(self, row: Row) -> float:
        """Return when the earliest of a row's faults struck, or else when its step was begun."""
        if row.faults:
            first = next(n for each, n in _numbered(self.rows) if each is row)
            marks = [reached(self.job.folder, first + n) for n in range(len(row.faults))]
            return min((mark.stat().st_mtime for mark in marks if mark.exists()), default=_FAR)
        record = self.job.record
        before = [line for rank in range(record.ranks) for line in record.lines(rank)]
        return min((line["at"] for line in before if line["step"] == row.step - 1), default=_FAR)


_FAR = float("inf")


def _allowed(numbers: int | Collection[int]) -> Collection[int]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _numbered(rows: Iterable[Row]) -> Iterator[tuple[Row, int]]:
    """Return each row with the number of its first fault."""
    number = 0
    for row in rows:
        yield row, number
        number += len(row.faults)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return the rows by their steps; rows that are nearer than three steps are refused."""
    found = sorted(rows, key=lambda row: row.step)
    for first, second in itertools.pairwise(found):
        waits = bool(second.faults) and second.faults[0].after > 0
        far = second.step - first.step >= 3
        assert far or waits, f"rows {first} and {second} are too near"
    return found


def run_rows(folder: Path, rows: Iterable[Row], **settings: object) -> Ended:
    """Run a job of one attempt through all rows."""
    return run_attempts(folder, [Attempt(tuple(in_order(rows)))], **settings)


def run_attempts(folder: Path, attempts: Sequence[Attempt], **settings: object) -> Ended:
    """Run the attempts of a job; an error of the job is kept for the tests of its rows."""
    rows = [row for attempt in attempts for row in attempt.rows]
    assert in_order(rows) == rows, "rows are not in the order of their steps"
    job = Job(folder, *(fault for row in rows for fault in row.faults), **settings)
    ended = Ended(job, attempts)
    numbers = dict(_numbered(rows))
    try:
        for attempt in attempts:
            job.start(**attempt.settings)
            for row in attempt.rows:
                if row.act is not None:
                    row.act(job, numbers[row])
            ended.ends.append(job.end())
            ended.left += job.leftovers()
            _drop(job, attempt, numbers)
            assert len(job.events_of(journal.Ended)) == len(ended.ends), "it ended more than once"
            assert ended.ends[-1].outcome == attempt.outcome, f"{ended.ends[-1]}"
    except Exception as error:
        ended.error = error
    finally:
        job.__exit__()
    ended.events = job.events()
    return ended


def _drop(job: Job, attempt: Attempt, numbers: Mapping[Row, int]) -> None:
    """Take faults of an ended attempt that have not struck from the ranks of the next one."""
    for row in attempt.rows:
        for number in range(numbers[row], numbers[row] + len(row.faults)):
            mark = reached(job.folder, number)
            if not mark.exists():
                mark.touch()


def each_row(*plans: Plan) -> list[object]:
    """Return the parameters (plan, row) of one test per row."""
    return [
        pytest.param(plan, row, id=f"{plan}: {row}")
        for plan in plans
        for attempt in plan.attempts
        for row in attempt.rows
    ]


@pytest.fixture(scope="session")
def ended_of(tmp_path_factory: pytest.TempPathFactory) -> EndedOf:
    """Run a plan, once per worker; a run that has broken off is not repeated."""
    known: dict[Plan, Ended] = {}
    begun: set[Plan] = set()

    def run(plan: Plan) -> Ended:
        if plan not in known:
            assert plan not in begun, f"plan {plan} was broken off in an earlier test"
            begun.add(plan)
            folder = tmp_path_factory.mktemp("plan")
            of_plan = {"variant": plan.variant, "processes": plan.ranks, "steps": plan.steps}
            known[plan] = run_attempts(folder, plan.attempts, **of_plan, **plan.settings)
        return known[plan]

    return run
