"""The coordinator is killed: training waits for another one, but not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs.checks import assert_recovered, assert_same_training, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all, wait_until
from training_jobs.record import Record

from rekindle.recovery import journal
from rekindle.recovery.policy import Policy

PAUSE_ALL = pause_all(12)


@pytest.mark.parametrize("nodes", [1, 2])
def test_coordinator_killed(nodes: int, job: Callable[..., Job], baseline: Record) -> None:
    """Under another coordinator the same processes train on, without the loss of a step."""
    run = job(*PAUSE_ALL, nodes=nodes)
    run.wait_pause(12)
    run.kill_coordinator()
    run.revive_coordinator()
    run.release_all()
    assert_recovered(run, baseline, replaced=())
    assert sum(steps_lost(run)) == 0


def test_coordinator_and_rank_killed(job: Callable[..., Job], baseline: Record) -> None:
    """A rank that dies while there is no coordinator is replaced by the next one."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    pid = run.pid(2)
    run.kill_coordinator()
    run.kill_pid(pid)
    run.revive_coordinator()
    run.release_all()
    assert_recovered(run, baseline, replaced={2})
    assert sum(steps_lost(run)) == 0


def test_coordinator_killed_during_a_recovery(job: Callable[..., Job], baseline: Record) -> None:
    """A coordinator that dies between a fault and its recovery leaves the rest to the next one."""
    run = job(Fault(1, "forward", 9), Fault(1, "start", life=2, do="pause"))
    run.wait_fault(1)
    run.kill_coordinator()
    run.revive_coordinator()
    run.release(1)
    assert_recovered(run, baseline, replaced={1})
    assert sum(steps_lost(run)) == 0


def test_coordinator_killed_for_good(job: Callable[..., Job], baseline: Record) -> None:
    """Without another coordinator agents and ranks end in time, and the job can be resumed."""
    pause = Fault(0, "forward", 9, do="pause")
    run = job(pause, checkpoint_every=4, policy=Policy(coordinator_timeout_s=0.5))
    run.wait_fault(0)
    run.wait_event(journal.Checkpointed, step=8)
    run.kill_coordinator()
    wait_until(lambda: not run.leftovers(), "everything gone")
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Formed)[-1].step == 8
    assert_same_training(run.record, baseline)
