"""Handle a running job in a test: read its records, wait for its events, break it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.job.spec import JobDirectory
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.protocol.http_views import JobView
from rekindle.recovery.journal import journal
from rekindle.reporting.step_records import StepRecord, effective, read_records

_LOOK_S = 0.01
_LINES = 25  # lines of each file in a story
_COLUMNS = 400

E = TypeVar("E", bound=journal.Event)
T = TypeVar("T")


class RunError(JobError):
    """A job under test did not do what a test waited for; the text ends with the job's story."""


class JobHandle:
    """One job, by its directory on this machine.

    limit_s: the default time limit of each wait, in seconds.
    """

    def __init__(self, directory: Path | str, *, limit_s: float = 120.0) -> None:
        self.directory = JobDirectory(directory)
        self.limit_s = limit_s
        self._decoded: tuple[bytes, list[journal.AnyEvent]] = (b"", [])

    # ---- its records

    def events(self) -> list[journal.AnyEvent]:
        """Read the events that the job's journal has so far."""
        try:
            content = self.directory.journal_file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return []
        if self._decoded[0] != content:
            self._decoded = (content, journal.read(content.splitlines()))
        return [*self._decoded[1]]

    def events_of(self, kind: type[E], **fields: object) -> list[E]:
        """Read the events of one kind whose fields have these values."""
        found = [event for event in self.events() if isinstance(event, kind)]
        return [e for e in found if all(getattr(e, k) == v for k, v in fields.items())]

    def incidents(self) -> list[journal.Incident]:
        """Return the incidents so far: causes, strategies, steps lost and times."""
        return journal.incidents(self.events())

    def records(self) -> dict[int, dict[int, StepRecord]]:
        """Return the values that the script has logged, by rank and step.

        If a step was repeated, its newest record counts.
        """
        return {rank: effective(r) for rank, r in read_records(self.directory.path).items()}

    def has_ended(self) -> bool:
        """Return whether the newest event is the end of an attempt."""
        return isinstance(next(reversed(self.events()), None), journal.Ended)

    def story(self) -> str:
        """Return the last lines of journal and logs, for the message of a failed test."""
        texts = []
        for path in (self.directory.journal_file, *sorted(self.directory.path.glob("*.log"))):
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()[-_LINES:]
                texts += [f"\n---- {path.name}", *(line[:_COLUMNS] for line in lines)]
        return "\n".join(texts)

    # ---- answers of its coordinator

    def client(self) -> JobClient:
        """Return a client of the job's coordinator. Raises JobError: none has started yet."""
        endpoint = self.directory.endpoint()
        if endpoint is None:
            raise JobError(f"the job in {self.directory.path} has no coordinator yet")
        return JobClient(endpoint, self.directory.secret())

    def status(self) -> JobView:
        """Ask the coordinator for the job's state. Raises JobError: it does not answer."""
        return self.client().status()

    def pid(self, rank: int) -> int:
        """Return the process id of a rank; wait until the rank has a process."""

        def found() -> int:
            view = self._answer()
            return view.ranks[rank].pid if view is not None else 0

        return self.wait_until(found, f"a process of rank {rank}")

    # ---- waits

    def wait_until(
        self,
        true: Callable[[], T],
        what: str,
        timeout_s: float | None = None,
        *,
        past_end: bool = False,
    ) -> T:
        """Return the first value of `true()` that is not false.

        past_end: whether the value can also come after the job's end.
        Raises RunError: the time is over, or the job has ended.
        """
        limit_s = self.limit_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            self._tend()
            ended = not past_end and self.has_ended()
            value = true()
            if value:
                return value
            if ended:
                raise RunError(f"the job ended before {what}\n{self.story()}")
            if time.monotonic() > deadline:
                raise RunError(f"this did not happen within {limit_s:g} s: {what}\n{self.story()}")
            time.sleep(_LOOK_S)

    def wait_event(
        self, kind: type[E], count: int = 1, *, timeout_s: float | None = None, **fields: object
    ) -> E:
        """Wait for the n-th event of a kind whose fields have these values, and return it."""

        def found() -> E | None:
            return next(iter(self.events_of(kind, **fields)[count - 1 :]), None)

        wanted = "".join(f" {name}={value}" for name, value in fields.items())
        event = self.wait_until(found, f"{count} x {kind.__name__}{wanted}", timeout_s)
        assert event is not None
        return event

    def wait_step(
        self, step: int, *, rank: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait until all ranks, or one rank, have finished `step` steps."""
        whose = "all ranks" if rank is None else f"rank {rank}"
        self.wait_until(
            lambda: self._finished(rank) >= step, f"{step} finished steps of {whose}", timeout_s
        )

    # ---- faults

    def inject(
        self,
        kind: InjectionKind | str,
        *,
        rank: int = 0,
        step: int | None = None,
        seconds: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        """Inject a fault into a rank in `step`, which must not have ended; None: the next step.

        The job must allow it (`rekindle run --allow-injection`).
        Raises RunError: the step is over, there is no such rank, or the job does not answer.
        """
        order = Inject(rank=rank, kind=InjectionKind(kind), step=step, seconds=seconds)
        self.wait_until(self._answer, "an answer of the job's coordinator", timeout_s)
        try:
            self.client().inject(order)
        except JobError as error:
            raise RunError(f"{error}\n{self.story()}") from error

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the processes of ranks on this machine, one directly after the other.

        Raises RunError: a process has ended before.
        """
        for pid in [self.pid(rank) for rank in ranks]:
            try:
                os.kill(pid, number)
            except ProcessLookupError as error:
                raise RunError(f"process {pid} of a rank has ended\n{self.story()}") from error

    # ---- for subclasses

    def _tend(self) -> None:
        """Do the job's tasks while a test waits; each wait calls this before each check."""

    def _answer(self) -> JobView | None:
        try:
            return self.status()
        except JobError:
            return None

    def _finished(self, rank: int | None) -> int:
        view = self._answer()
        if view is not None:
            return view.finished if rank is None else view.ranks[rank].finished
        return max((event.finished for event in self.events_of(journal.Ended)), default=0)
