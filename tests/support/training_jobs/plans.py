"""A job that meets many faults, one after the other; each fault is a row of a table.

A `Plan` is a job: its attempts, and the rows of each. The fixture `running.ended_of` runs a plan
once per worker. One test per row then checks what followed from that row's fault, and one more test
checks the end of the job (see `ended.Ended`).
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

_LAST = (Strategy.DUMP, Strategy.FAIL)  # training does not continue after these


@dataclass(frozen=True, eq=False)
class Row:
    """One fault of a long job, and what must follow from it.

    name: the id of the row's test.
    step: the first step in which the fault can strike. Rows are in the order of
        their steps, with at least three steps between them. Rows of the same step are possible if
        each of them waits for the one before it (`Fault.after`).
    faults: what the ranks inflict upon themselves. act: what is done from outside meanwhile; it
        gets the job and the number of the row's first fault (see `Job.wait_fault`), and
        `Ended.seen` keeps its result.
    strategies: what must be decided, in order; empty: there is no incident; None: not checked.
    lost: the steps lost, or the numbers allowed; None: not checked.
    resumed: the steps finished from which training continues, or the numbers allowed; None: not
        checked.
    replaced: the ranks that have a new process afterwards; None: not checked.
    sources: where the ranks' states come from, in the row's last generation or in each of its
        generations; None: not checked.
    cause: the kind of the fault that is the cause, and its rank; None: not checked.
    check: more to check, once the job has ended.
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
        """Whether training continues after the fault."""
        return not self.strategies or self.strategies[-1] not in _LAST


@dataclass(frozen=True, eq=False)
class Attempt:
    """One attempt of a job, the faults that it meets, and its end.

    settings: what changes in the job's description from this attempt on, or a function that
        returns it.
    outcome, reason: how the attempt ends; the reason contains this text.
    replaces: whether nodes that are wanted are brought.
    name: by which `Ended` knows the attempt.
    after: what is done when the attempt has ended; `Ended.after` keeps its result.
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
    """A job with its attempts. settings: arguments of `Job`."""

    name: str
    attempts: tuple[Attempt, ...]
    variant: str = "ddp"
    ranks: int = RANKS
    steps: int = STEPS
    settings: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def each_row(*plans: Plan) -> list[object]:
    """Return the parameters (plan, row) of one test per row."""
    return [
        pytest.param(plan, row, id=f"{plan}: {row}")
        for plan in plans
        for attempt in plan.attempts
        for row in attempt.rows
    ]
