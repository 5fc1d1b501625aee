"""The coordinator is killed: training waits for another one, but not for ever."""

from __future__ import annotations

from collections.abc import Callable

from training_jobs.checks import assert_recovered, assert_same_training, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all, wait_until
from training_jobs.record import Record

from rekindle.recovery import journal
from rekindle.recovery.policy import Policy

PAUSE_ALL = pause_all(12)


def test_coordinator_of_two_nodes_killed(job: Callable[..., Job], baseline: Record) -> None:
    """All agents come to the next coordinator, and the same processes train on."""
    run = job(*PAUSE_ALL, nodes=2)
    run.wait_pause(12)
    run.kill_coordinator()
    run.revive_coordinator()
    run.release_all()
    assert_recovered(run, baseline, replaced=())
    assert sum(steps_lost(run)) == 0


def test_coordinator_killed_for_good(job: Callable[..., Job], baseline: Record) -> None:
    """Without another coordinator agents and ranks end in time, and the job can be resumed."""
    pause = Fault(0, "forward", 9, do="pause")
    policy = Policy(coordinator_timeout_s=0.5)
    run = job(pause, snapshot_every=0, checkpoint_every=4, policy=policy)
    run.wait_fault(0)
    run.wait_event(journal.Checkpointed, step=8)
    run.kill_coordinator()
    wait_until(lambda: not run.leftovers(), "everything gone")
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Formed)[-1].step == 8
    assert_same_training(run.record, baseline)
