"""The coordinator is killed: training goes on without it, and another one takes its place."""

from __future__ import annotations

import os
from collections.abc import Callable

from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.job import Job, pause_all
from training_jobs.processes import MARK
from training_jobs.record import Record

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy


def kill_coordinator(run: Job) -> None:
    """Kill it, and see it gone."""
    run.coordinator.kill()
    run.coordinator.wait()


def revive(run: Job) -> None:
    """Start another one."""
    assert run.engine is not None
    os.environ[MARK] = run.mark
    try:
        run.endpoint = run.engine.revive()
    finally:
        del os.environ[MARK]


def test_training_goes_on_without_a_coordinator(job: Callable[..., Job], baseline: Record) -> None:
    """Ranks train on while there is no coordinator; under another one they lose no step."""
    run = job(nodes=2)
    run.wait_step(0, 4)
    kill_coordinator(run)
    run.wait_step(0, 8)
    revive(run)
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.strategy) == (Kind.COORDINATOR, Strategy.RETRY)


def test_rank_killed_while_there_is_no_coordinator(
    job: Callable[..., Job], baseline: Record
) -> None:
    """The next coordinator is told of a rank that died meanwhile, and recovers it."""
    run = job(*pause_all(4), nodes=2)
    run.wait_pause(4)
    pid = run.pid(3)
    kill_coordinator(run)
    os.kill(pid, 9)
    revive(run)
    run.release_all()
    assert_recovered(run, baseline, replaced={3})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert incident.cause.kind is Kind.PROCESS


def test_coordinator_killed_while_it_recovers(job: Callable[..., Job], baseline: Record) -> None:
    """An incident that a coordinator left open is closed by the one that takes its place."""
    run = job(*pause_all(4), nodes=2)
    run.wait_pause(4)
    run.kill(1)
    run.wait_event(journal.FaultSeen)
    kill_coordinator(run)
    revive(run)
    run.release_all()
    assert_recovered(run, baseline, replaced={1})
    assert set(steps_lost(run)) == {0}


def test_ranks_end_when_no_coordinator_comes(job: Callable[..., Job]) -> None:
    """Without a coordinator for longer than the policy allows, nothing of the job is left."""
    run = job(steps=100_000, policy=Policy(coordinator_timeout_s=1.0))
    run.wait_step(0, 4)
    kill_coordinator(run)
    run.wait(lambda: not run.leftovers(), "the end of all processes")
