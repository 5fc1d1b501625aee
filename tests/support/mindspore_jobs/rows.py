"""One job of MindSpore with several faults. Each fault is a row of a table.

All ranks pause at the step of a row until the incidents of earlier rows are closed. So each row has
exactly one incident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindspore_jobs.job import MindSporeJob
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

_BEGIN = 1  # the step at which all faults are injected


@dataclass(frozen=True)
class Row:
    """One fault, and its expected recovery.

    `name`: the name of the test.
    `step`: the step at which the ranks pause before the fault.
    `injected`: the kind of a fault that is injected in the step after the pause.
    `ranks`: the ranks that get the injected fault.
    `act`: a function that causes the fault during the pause. Without `injected` and `act`, the
    script causes the fault.
    `strategy`: the final strategy.
    `first`: a strategy that the coordinator can choose before.
    `back_to`: the step at which training resumes, or None if no step is lost.
    `message`: a part of the message of the first fault.
    `closes`: whether a step must follow. Otherwise the row is the last one.
    """

    name: str
    step: int
    injected: InjectionKind | None = None
    ranks: tuple[int, ...] = ()
    act: Callable[[MindSporeJob], None] | None = None
    strategy: Strategy = Strategy.RETRY
    first: Strategy | None = None
    back_to: int | None = None
    message: str = ""
    closes: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def replaces(self) -> bool:
        """Return whether the recovery starts new processes for all ranks."""
        return self.strategy is not Strategy.RETRY


@dataclass
class Ended:
    """A job that ran through the rows, and its progress.

    `pids`: the process ids of the ranks at the step of each row, and at the end.
    """

    job: MindSporeJob
    rows: Sequence[Row]
    pids: list[list[int]] = field(default_factory=list)
    error: Exception | AssertionError | None = None

    def check(self, row: Row) -> None:
        """Check the expected recovery of a row."""
        number = self.rows.index(row)
        incidents = self.job.incidents()
        assert len(self.pids) > number + 1, self.error
        incident = incidents[number]
        assert incident.closed or not row.closes, self.error
        assert incident.strategy is row.strategy, incident
        assert {*incident.strategies} <= {row.strategy, row.first}, incident
        assert row.message in incident.faults[0].message, incident
        if row.back_to is None:
            assert incident.steps_lost == 0, incident
        else:
            assert incident.resumed_at == row.back_to, incident
        before, after = map(set, self.pids[number : number + 2])
        assert before.isdisjoint(after) if row.replaces else before == after

    def check_end(self) -> None:
        """Check that the job ended without an error, with one incident for each row."""
        if self.error is not None:
            raise self.error
        assert len(self.job.incidents()) == len(self.rows), self.job.story()


def end_well(job: MindSporeJob) -> None:
    """Check that the job succeeds."""
    assert job.end() == 0, job.story()


def meet(
    job: MindSporeJob, rows: Sequence[Row], end: Callable[[MindSporeJob], None] = end_well
) -> Ended:
    """Run a job through all rows. Keep an error of the job for the tests of its rows."""
    ended = Ended(job, rows)
    for step in (_BEGIN, *(row.step for row in rows)):
        job.hold(step)
    with job:
        try:
            _wait_quiet(job, _BEGIN, 0)
            _inject_all(job, rows)
            job.release(_BEGIN)
            for number, row in enumerate(rows):
                _wait_quiet(job, row.step, number)
                ended.pids.append(job.pids())
                if row.act is not None:
                    row.act(job)
                job.release(row.step)
            end(job)
            ended.pids.append([result["pid"] for result in job.results().values()])
        except (Exception, AssertionError) as error:
            ended.error = error
    return ended


def _inject_all(job: MindSporeJob, rows: Sequence[Row]) -> None:
    """Inject all faults early. The next process of a rank gets the faults of later steps again."""
    for row in rows:
        if row.injected is not None:
            for rank in row.ranks:
                job.inject(rank, row.injected, row.step + 1)


def _wait_quiet(job: MindSporeJob, step: int, incidents: int) -> None:
    """Wait until all ranks pause at a step and this number of incidents is closed."""

    def quiet() -> bool:
        assert not job.events_of(journal.Ended), "the job has ended"
        found = job.incidents()
        closed = len(found) == incidents and all(incident.closed for incident in found)
        return closed and all(rank.finished == step for rank in job.status().ranks)

    job.wait_event(journal.Restored)
    job.wait(quiet, f"step {step} after {incidents} incidents")
