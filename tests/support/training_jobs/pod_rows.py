"""One job in pods with several consecutive events. Each event is a row.

All ranks pause in the step of a row. The act of the row then disturbs the job, and lets the ranks
train until they pause for the next row. One test for each row checks the facts in the journal and
the cluster. If the job fails at a row, the rows before it still have their facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rekindle.recovery.journal import journal
from training_jobs.injection import Fault, reached
from training_jobs.job import pause_all
from training_jobs.pods import PodJob

E = TypeVar("E", bound=journal.Event)


@dataclass(frozen=True)
class Row:
    """One event of a long job. `act` causes it in this step, and returns data for its test."""

    step: int
    act: Callable[[PodJob], Any]

    @property
    def name(self) -> str:
        """The name of the row's facts."""
        return self.act.__name__


@dataclass
class Facts:
    """The events between the step of a row and the step of the next row."""

    noted: Any
    events: list[journal.AnyEvent]
    before: dict[str, str]  # uids of the pods of nodes and spares, by name
    after: dict[str, str]

    @property
    def incidents(self) -> list[journal.Incident]:
        """The incidents of the row. All of them must be closed."""
        found = journal.incidents(self.events)
        assert all(incident.closed for incident in found), found
        return found

    def of(self, kind: type[E], **fields: object) -> list[E]:
        """Return the events of one kind whose fields have these values."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [e for e in found if all(getattr(e, k) == v for k, v in fields.items())]


@dataclass
class Story:
    """A job that ran through the rows, and its progress."""

    job: PodJob
    facts: dict[str, Facts] = field(default_factory=dict)
    events: list[journal.AnyEvent] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    ended: journal.Ended | None = None
    left: list[str] = field(default_factory=list)
    error: Exception | None = None
    log_text: str = ""

    def of(self, row: Row) -> Facts:
        """Return the facts of a row."""
        assert row.name in self.facts, f"the job broke before: {self.error}{self.log_text}"
        return self.facts[row.name]

    def assert_succeeded(self) -> None:
        """Check that the job succeeded, and that no objects or processes are left."""
        assert self.error is None, f"{self.error}{self.log_text}"
        assert self.ended is not None
        assert self.ended.outcome == "succeeded", self.log_text
        assert self.left == []


def pauses(rows: Iterable[Row]) -> list[Fault]:
    """Return the first faults of a job, which pause all ranks in the step of each row."""
    return [each for row in rows for each in pause_all(row.step, life=0)]


@contextlib.contextmanager
def loss(job: PodJob) -> Iterator[None]:
    """Wait until the journal has the loss that the block causes. All ranks pause meanwhile.

    The agent in a pod that is to end waits some seconds for orders of the coordinator.
    """
    count = len(job.events_of(journal.FaultSeen))
    yield
    job.wait_event(journal.FaultSeen, count=count + 1)


def let_go(job: PodJob) -> None:
    """Let all paused ranks continue."""
    for number, fault in enumerate(job.faults):
        if fault.do == "pause" and reached(job.folder, number).exists():
            job.release(number)


def run_rows(job: PodJob, rows: Sequence[Row]) -> Story:
    """Run a started job through all rows to its end, and remove its objects."""
    story = Story(job)
    try:
        for number, row in enumerate(rows):
            _hold(job, rows, number)
            known, before = len(job.events()), _uids(job)
            noted = row.act(job)
            if number + 1 < len(rows):
                _hold(job, rows, number + 1)
            else:
                story.ended = job.end()
            events = job.events()[known:]
            story.facts[row.name] = Facts(noted, events, before, _uids(job))
        story.events = job.events()
        story.outputs = job.look_away()
        job.engine.release()
        story.left = job.objects()
        job.wait(lambda: not job.leftovers(), "the end of all processes")
    except Exception as error:
        story.error, story.log_text = error, job.story()
    return story


def _hold(job: PodJob, rows: Sequence[Row], number: int) -> None:
    """Wait until all ranks pause for a row."""
    job.wait_pause(rows[number].step, first=number * job.record.ranks)


def _uids(job: PodJob) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in job.worker_pods().items()}
