"""Wait for the moment of a fault."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import psutil
from training_jobs.record import Record
from waiting import LIMIT_S, wait_until

from campaign.faults import Fault, Moment
from campaign.launches import Launch
from campaign.victims import Processes
from rekindle.job.journal_reader import events_in
from rekindle.recovery.journal import journal

T = TypeVar("T")
ATTEMPT_S = 2 * LIMIT_S  # for one part of an attempt; some faults are found after 30 s
_KINDS: dict[str, type[journal.Event]] = {
    "fault": journal.FaultSeen,
    "ranks-started": journal.RanksStarted,
    "formed": journal.Formed,
}
_LOOK_S = 0.02


class Attempt:
    """The newest attempt of a job, as its files and processes show it.

    `begun`: number of events in the journal when the attempt started.
    """

    def __init__(self, launch: Launch, record: Record, processes: Processes) -> None:
        self.launch, self.record, self.processes = launch, record, processes
        self.begun = 0
        self._killed: list[psutil.Process] = []

    def events(self) -> list[journal.AnyEvent]:
        """Return the events of this attempt."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return list(events_in(self.launch.directory.journal_file))[self.begun :]
        return []

    def count(self, kind: type[journal.Event]) -> int:
        """Return the number of events of a kind."""
        return sum(isinstance(event, kind) for event in self.events())

    def finished(self) -> int:
        """Return the steps that all ranks have finished, as far as their records show."""
        steps = [max(self.record.steps(rank), default=0) for rank in range(self.record.ranks)]
        return min(steps)

    def is_over(self) -> bool:
        """Return whether the job has ended, or its launcher."""
        return bool(self.count(journal.Ended)) or self.launch.has_ended()

    def wait(self, true: Callable[[], T], what: str) -> T | None:
        """Return the first value of `true()` that is not false; None: the attempt ended before."""
        found: list[T] = []

        def look() -> bool:
            over = self.is_over()
            value = true()
            if value:
                found.append(value)
            return bool(value) or over

        wait_until(look, what, ATTEMPT_S, pause_s=_LOOK_S)
        return found[0] if found else None

    def reaches(self, fault: Fault) -> bool:
        """Wait for the moment of a fault; return False if the attempt ends before."""
        match fault.moment:
            case Moment.LAUNCH:
                look = lambda: self.processes.find(fault.victim, fault.number)  # noqa: E731
                reached = bool(self.wait(look, "the process of the fault"))
            case Moment.START:
                reached = bool(self.wait(lambda: self.count(journal.RanksStarted), "ranks"))
            case Moment.TRAINING | Moment.CHECKPOINT:
                reached = self._trains(fault.step)
            case Moment.RECOVERY:
                reached = self._trains(fault.step) and self._recovers(fault)
            case Moment.END:
                reached = bool(self.wait(self._has_result, "the last step"))
        if reached:
            time.sleep(fault.delay_s)
        return reached

    def _trains(self, step: int) -> bool:
        trains = lambda: self.count(journal.FirstStep) and self.finished() >= step  # noqa: E731
        return bool(self.wait(trains, f"step {step}"))

    def _recovers(self, fault: Fault) -> bool:
        kind = _KINDS[fault.event]
        count = self.count(kind)
        ranks = self.processes.ranks()
        if not ranks:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks[fault.killed % len(ranks)].kill()
        return bool(self.wait(lambda: self.count(kind) > count, f"the event {fault.event}"))

    def _has_result(self) -> bool:
        return any(self.record.result(rank) for rank in range(self.record.ranks))
