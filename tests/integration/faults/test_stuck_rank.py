"""Ranks that live but do not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy


@pytest.mark.parametrize("how", soak_but(["stop", "hang"], "hang"))
def test_rank_that_cannot_leave_its_step(
    how: str, job: Callable[..., Job], baseline: Record
) -> None:
    """A stopped or hanging rank that does not leave a broken step in time is replaced too."""
    run = job(Fault(2, "forward", 9, do=how), policy=Policy(leave_timeout_s=3.0))
    run.wait_fault(0)
    run.kill(1)
    assert_recovered(run, baseline, replaced={1, 2})
    assert steps_lost(run) == [0]
    assert {fault.kind for fault in run.incidents()[0].faults} >= {Kind.PROCESS, Kind.STUCK}


def test_replacement_that_does_not_arrive(job: Callable[..., Job], baseline: Record) -> None:
    """A replacement that hangs before it reaches its Session is replaced in its turn."""
    hang = Fault(1, "start", life=2, do="hang")
    run = job(Fault(1, "forward", 9), hang, policy=Policy(join_timeout_s=2.0))
    assert_recovered(run, baseline, replaced={1})
    assert steps_lost(run) == [0]
    assert len(run.record.lives(1)) == 3
