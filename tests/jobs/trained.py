"""A job of pretended ranks that trains, and what tests ask about it."""

from __future__ import annotations

from jobs.driver import Driver
from rekindle.recovery import journal
from rekindle.recovery.plan import Source
from rekindle.recovery.policy import Strategy
from rekindle.runtime import protocol as p
from rekindle.runtime.state import Phase

SIGKILL = 9


def trained(finished: int = 1, **world: object) -> Driver:
    """A job whose ranks have all finished so many steps."""
    job = Driver(**world)
    job.train(finished)
    assert job.phase is Phase.TRAINING
    return job


def sources(job: Driver) -> dict[int, Source]:
    """Where each rank takes its state from, by the last commands."""
    forms = job.told(p.Form)
    return {rank: plan.source for form in forms.values() for rank, plan in form.plan.items()}


def strategies(job: Driver) -> list[Strategy]:
    """What was decided so far."""
    return [decided.strategy for decided in job.recorded(journal.Decided)]
