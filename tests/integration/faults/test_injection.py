"""Faults injected into a running job: each is met as a real one of its kind is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.errors import JobError
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

HOLD = Fault(0, "forward", 3, do="pause")  # keeps the job in a step while it is told


def held(job: Callable[..., Job], **settings: object) -> Job:
    """Start a job that waits in step 3."""
    run = job(HOLD, **settings)
    run.wait_fault(0)
    return run


@pytest.mark.parametrize(
    ("kind", "strategy", "cause", "replaced", "step"),
    soak_but(
        [
            ("kill", Strategy.RECOVER_IN_PLACE, Kind.PROCESS, {2}, 9),
            ("oom", Strategy.RECOVER_IN_PLACE, Kind.DEVICE_OOM, {2}, None),
            ("uce", Strategy.RETRY, Kind.DEVICE_MEMORY, (), 9),
            ("torn-update", Strategy.RETRY, Kind.DEVICE_MEMORY, (), None),
            ("node-lost", Strategy.RECOVER, Kind.NODE_LOST, {2, 3}, 9),
        ],
        ("kill", Strategy.RECOVER_IN_PLACE, Kind.PROCESS, {2}, 9),
        ("uce", Strategy.RETRY, Kind.DEVICE_MEMORY, (), 9),
        ("node-lost", Strategy.RECOVER, Kind.NODE_LOST, {2, 3}, 9),
    ),
)
def test_fault_that_costs_no_step(
    kind: str,
    strategy: Strategy,
    cause: Kind,
    replaced: set[int],
    step: int | None,
    job: Callable[..., Job],
    baseline: Record,
) -> None:
    """It strikes in the step that was named, or in the next one, and is recovered."""
    run = held(job, nodes=2)
    run.inject(2, kind, step=step)
    run.release(0)
    assert_recovered(run, baseline, replaced=replaced)
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.kind) == (strategy, cause)
    if kind != "node-lost":  # what it said went down with its agent
        assert f"{kind} injected into step {'' if step is None else step}" in run.stderr(2)


def test_error_that_looks_like_the_scripts_own(job: Callable[..., Job]) -> None:
    """The job fails with it, where no restart is allowed."""
    run = held(job)
    run.inject(1, "exception", step=5)
    run.release(0)
    ended = run.end()
    assert ended.outcome == "failed"
    assert "injected into step 5 of rank 1" in ended.reason


def test_slow_step_changes_nothing(job: Callable[..., Job], baseline: Record) -> None:
    """The others wait for it."""
    run = held(job)
    run.inject(1, "slow", step=5, seconds=0.2)
    run.release(0)
    assert_recovered(run, baseline, replaced=())
    assert not run.incidents()


def test_hanging_rank_is_replaced_when_the_others_leave(
    job: Callable[..., Job], baseline: Record
) -> None:
    """It does not follow the call to regroup."""
    run = held(job, policy=Policy(leave_timeout_s=3.0))
    run.inject(1, "hang", step=5)
    run.release(0)
    run.wait(lambda: "hang injected into step 5" in run.stderr(1), "the hang")
    run.kill(2)
    assert_recovered(run, baseline, replaced={1, 2})
    assert steps_lost(run) == [0]


def test_injections_that_are_refused(job: Callable[..., Job]) -> None:
    """No rank of that number, a step that is past, and a job that does not allow it."""
    run = held(job)
    with pytest.raises(JobError, match="no rank 4 in a world of 4"):
        run.inject(4, "kill")
    run.wait(lambda: run.status().finished == 3, "three steps")
    with pytest.raises(JobError, match="step 1 is past"):
        run.inject(1, "kill", step=1)
    run.release(0)
    run.end()
    run.plan(dataclasses.replace(HOLD, life=0))
    run.start(allow_injection=False)
    run.wait_fault(0)
    with pytest.raises(JobError, match="--allow-injection"):
        run.inject(1, "kill")
    run.release(0)
    run.end()
