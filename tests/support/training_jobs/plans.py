"""A job with many consecutive faults. Each fault is a row of a table.

A `Plan` is a job: its attempts, and the rows of each attempt. The fixture `running.ended_of` runs a
plan once for each test worker. One test for each row then checks the recovery from that row's
fault. One more test checks the end of the job (see `ended.Ended`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy
from training_jobs import RANKS
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job

if TYPE_CHECKING:
    from training_jobs.ended import Ended

Act = Callable[[Job, int], Any]
Settings = Mapping[str, Any]

_LAST = (Strategy.DUMP, Strategy.FAIL)  # training does not continue after these strategies


@dataclass(frozen=True, eq=False)
class Row:
    """One fault of a long job, and its expected recovery. None: a field is not checked.

    `name`: the id of the row's test.
    `step`: the first step in which the fault can occur. Rows are in the order of their steps, with
    at least three steps between them. Rows of the same step are possible if each waits for the
    previous one (`Fault.after`).
    `faults`: the faults that the ranks cause.
    `act`: a function that acts on the job during this time. It gets the job and the number of the
    row's first fault (see `Job.wait_fault`). `Ended.seen` keeps its result.
    `strategies`: the expected strategies, in order. Empty: there is no incident.
    `lost`: the number of lost steps, or the allowed numbers.
    `resumed`: the number of finished steps at which training continues, or the allowed numbers.
    `replaced`: the ranks that get a new process.
    `sources`: the sources of the ranks' states, in the row's last generation or in each of its
    generations.
    `cause`: the kind and the rank of the fault that is the cause.
    `check`: an additional check after the end of the job.
    """

    name: str
    step: int
    faults: tuple[Fault, ...]
    act: Act | None = None
    strategies: tuple[Strategy, ...] | None = (Strategy.RECOVER_IN_PLACE,)
    lost: int | Collection[int] | None = 0
    resumed: int | Collection[int] | None = None
    replaced: Collection[int] | None = frozenset()
    sources: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None
    cause: tuple[FaultKind, int] | None = None
    check: Callable[[Ended, journal.Incident], None] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def continues(self) -> bool:
        """Return whether training continues after the fault."""
        return not self.strategies or self.strategies[-1] not in _LAST


@dataclass(frozen=True, eq=False)
class Attempt:
    """One attempt of a job, its faults, and its end.

    `settings`: changes of the job's spec from this attempt, or a function that returns them.
    `outcome`: the outcome of the attempt.
    `reason`: a text in the reason of the outcome.
    `replaces`: whether the job replaces nodes that the coordinator requests.
    `name`: the name of the attempt in `Ended`.
    `after`: a function that runs after the attempt. `Ended.after` keeps its result.
    """

    rows: tuple[Row, ...] = ()
    settings: Settings | Callable[[Job], Settings] = field(default_factory=dict)
    outcome: str = "succeeded"
    reason: str = ""
    replaces: bool = True
    name: str = ""
    after: Callable[[Job], Any] | None = None

    def __post_init__(self) -> None:
        for first, second in itertools.pairwise(self.rows):
            near = second.step < first.step + (0 if second.faults[0].after else 3)
            assert not near, f"rows {first} and {second} are too near"


@dataclass(frozen=True, eq=False)
class Plan:
    """A job with its attempts. `settings`: arguments of `Job`."""

    name: str
    attempts: tuple[Attempt, ...]
    variant: str = "ddp"
    ranks: int = RANKS
    steps: int = STEPS
    settings: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def each_row(*plans: Plan) -> list[object]:
    """Return the parameters (plan, row) of one test for each row."""
    return [
        pytest.param(plan, row, id=f"{plan}: {row}")
        for plan in plans
        for attempt in plan.attempts
        for row in attempt.rows
    ]
