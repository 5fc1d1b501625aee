"""A job that ran a plan, and the checks of its rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import reached
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record

E = TypeVar("E", bound=journal.Event)
EndedOf = Callable[[Plan], "Ended"]

_FAR = float("inf")
_RESTARTS = (Strategy.RESTART, Strategy.HANG_RESTART)


@dataclass
class Ended:
    """The attempts of a job, and its progress.

    `error`: the exception that ended the run early.
    `story`: the history of the job at that time.
    `numbers`: the number of each row's first fault.
    `journals`: the events of each attempt.
    `ends`: the end of each attempt.
    `seen`: the results of the acts, by the names of the rows.
    `after`: the results of `Attempt.after`, by the names of the attempts.
    `left`: processes that still ran after an attempt.
    """

    job: Job
    attempts: Sequence[Attempt]
    error: Exception | None = None
    story: str = ""
    numbers: dict[Row, int] = field(default_factory=dict)
    journals: list[list[journal.AnyEvent]] = field(default_factory=list)
    ends: list[journal.Ended] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def only(self, which: int | str) -> Ended:
        """Return a copy with one attempt only, by its number or its name."""
        names = [attempt.name for attempt in self.attempts]
        number = names.index(which) if isinstance(which, str) else which
        own = {
            name: getattr(self, name)[number : number + 1]
            for name in ("attempts", "journals", "ends")
        }
        return dataclasses.replace(self, **own)

    # ---- results

    @property
    def rows(self) -> list[Row]:
        """The rows of all attempts."""
        return [row for attempt in self.attempts for row in attempt.rows]

    @property
    def events(self) -> list[journal.AnyEvent]:
        """The events of all attempts."""
        return list(itertools.chain(*self.journals))

    @property
    def incidents(self) -> list[journal.Incident]:
        """All incidents of attempts; those between two attempts are in `between`."""
        return [each for each in journal.incidents(self.events) if not _is_between(each)]

    @property
    def between(self) -> list[journal.Incident]:
        """The steps that were lost between an attempt and the next one, as incidents."""
        return list(filter(_is_between, journal.incidents(self.events)))

    def of(self, kind: type[E], row: Row | None = None) -> list[E]:
        """Return the events of one kind. With a row, return only events of this row."""
        events = self.events if row is None else self.events_of(row)
        return [event for event in events if isinstance(event, kind)]

    def events_of(self, row: Row) -> list[journal.AnyEvent]:
        """Return the events between the start of a row and the start of the next row."""
        begin, end = self.window(row)
        return [event for event in self.events if begin <= event.at < end]

    def incidents_of(self, row: Row) -> list[journal.Incident]:
        """Return the incidents of a row, with their events before the start of the next row.

        Rows of the same step share an incident, because an incident closes when a step is finished.
        """
        return [each for each in journal.incidents(self.events_of(row)) if each.faults]

    def is_closed(self, incident: journal.Incident) -> bool:
        """Return whether training continued after an incident."""
        return any(each.closed for each in self.incidents if each.number == incident.number)

    def began(self) -> tuple[int, dict[str, int]]:
        """Return the finished steps of the first generation, and the sources of its states."""
        [formed, *_] = self.of(journal.Formed)
        return formed.step, formed.sources

    def replaced_in(self, row: Row) -> set[int]:
        """Return the ranks that got a new process between the start of a row and the next row."""
        begin, end = self.window(row)
        record = self.job.record
        return {r for r in range(record.ranks) if any(begin <= at < end for at in record.births(r))}

    def window(self, row: Row) -> tuple[float, float]:
        """Return the start of a row, and the start of the next row or the end of the attempt."""
        rows = self.rows
        begin = self._begin(row)
        ends = [self._begin(later) for later in rows[rows.index(row) + 1 :]]
        ends += [each.at for each in self.ends if each.at >= begin]
        return begin, min(ends, default=_FAR)

    def _begin(self, row: Row) -> float:
        """Return when the first fault of a row occurred."""
        if row not in self.numbers:  # its attempt has not started
            return _FAR
        first = self.numbers[row]
        marks = [reached(self.job.folder, first + n) for n in range(len(row.faults))]
        return min((mark.stat().st_mtime for mark in marks if mark.exists()), default=_FAR)

    # ---- checks

    def check(self, row: Row) -> journal.Incident | None:
        """Check the expected recovery of a row, and return its last incident or None."""
        found = self.incidents_of(row)
        why = f"row {row}: {self.error}{self.story}"
        if row.strategies == ():
            assert found == []
            assert self._begin(row) < _FAR, why
            assert row.act is None or row.name in self.seen, why
        else:
            assert found, f"no incident of {why}"
        *before, last = [self.is_closed(each) for each in found] or [row.continues]
        assert all(before), why
        assert last is row.continues, why
        decided = tuple(strategy for each in found for strategy in each.strategies)
        assert row.strategies in (None, decided), found
        lost = [each.steps_lost for each in found if each.closed]
        assert None not in lost, why
        assert _allows(row.lost, sum(each or 0 for each in lost)), found
        assert row.replaced is None or self.replaced_in(row) == set(row.replaced), found
        if row.sources is not None:
            sources = [formed.sources for formed in self.of(journal.Formed, row)]
            one = isinstance(row.sources, Mapping)
            assert (sources[-1] if one else sources) == row.sources, sources
        if found:
            assert _allows(row.resumed, found[-1].resumed_at), found
            cause = found[-1].cause
            assert row.cause in (None, (cause.kind, cause.rank)), found
        incident = found[-1] if found else None
        if row.check is not None:
            row.check(self, incident)
        return incident

    def check_ends(self) -> list[journal.Ended]:
        """Check the ends of the attempts, and that no process is left. Return the ends."""
        assert len(self.ends) == len(self.attempts), f"{self.error}{self.story}"
        for attempt, end in zip(self.attempts, self.ends, strict=True):
            assert end.outcome == attempt.outcome, f"{end}{self.story}"
            assert attempt.reason in end.reason, end
        assert self.left == []
        return self.ends

    def check_end(self, baseline: Record, *, wrong: Mapping[int, int] | None = None) -> None:
        """Check the ends of the attempts, and that the training equals the baseline bit by bit."""
        assert self.error is None, f"{self.error}{self.story}"
        self.check_ends()
        assert_same_training(self.job.record, baseline, wrong=wrong)
        assert_samples_once(self.job.record)
        self.check_processes()
        of_rows = {each.number for row in self.rows for each in self.incidents_of(row)}
        assert of_rows == {each.number for each in self.incidents}, "an incident of no row"

    def check_processes(self) -> None:
        """Check that the journal has all starts of processes, and that each last process succeeded.

        A restart can end new processes before they reach the script. A coordinator can fail after
        it started processes and before the journal has them.
        """
        record = self.job.record
        begin = self.events[0].at
        started = [event.ranks for event in self.of(journal.RanksStarted)]
        decided = [strategy for each in self.incidents for strategy in each.strategies]
        restarts = sum(strategy in _RESTARTS for strategy in decided)
        lost = sum(
            event.fault.kind is FaultKind.COORDINATOR for event in self.of(journal.FaultSeen)
        )
        for rank in range(record.ranks):
            lives = sum(at >= begin for at in record.births(rank))
            named = sum(rank in ranks for ranks in started)
            assert named - restarts <= lives <= named + lost, f"rank {rank}: {lives} of {named}"
            assert record.result(rank)["pid"] == record.lives(rank)[-1], f"rank {rank}"


def _is_between(incident: journal.Incident) -> bool:
    return incident.cause.message.startswith("the earlier attempt ended")


def _allows(wanted: int | Collection[int] | None, number: int) -> bool:
    """Return whether a number is the wanted one or one of the wanted ones; None: any number is."""
    return wanted is None or number in ((wanted,) if isinstance(wanted, int) else wanted)
