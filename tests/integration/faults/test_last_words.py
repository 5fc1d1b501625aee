"""A job that ends without success leaves last words, and the next attempt goes on from there."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.policy import INNER, Policy, Strategy

PAUSE_ALL = pause_all(12)
LAST_WORDS = Policy(strategies=(Strategy.DUMP,))


def assert_resumes(run: Job, baseline: Record, *, at: int) -> None:
    """The next attempt goes on after step `at`, and ends as the uninterrupted run did."""
    run.plan()
    run.start(policy=Policy())
    assert run.end().outcome == "succeeded", run.story()
    first = next(e for e in reversed(run.events()) if isinstance(e, journal.JobStarted))
    formed = next(e for e in run.events() if isinstance(e, journal.Formed) and e.seq > first.seq)
    assert (formed.step, formed.sources.get("checkpoint", 0) > 0) == (at, at > 0)
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    assert run.leftovers() == []


def test_all_ranks_are_dead(job: Callable[..., Job], baseline: Record) -> None:
    """The agents' snapshots outlive their ranks."""
    run = job(*PAUSE_ALL, nodes=2, policy=LAST_WORDS)
    run.wait_pause(12)
    run.kill(*range(RANKS))
    assert run.end().outcome == "failed"
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.DUMP
    assert incident.reason.endswith("last words: the snapshot of step 10 is to be written")
    (written,) = run.events_of(journal.Checkpointed)
    assert written.step == 10
    assert_resumes(run, baseline, at=10)


def test_script_raises(job: Callable[..., Job], baseline: Record) -> None:
    """A run that its script ends loses no more than the snapshot interval."""
    run = job(Fault(1, "forward", step=12, do="raise"), policy=LAST_WORDS)
    assert run.end().outcome == "failed"
    assert [event.step for event in run.events_of(journal.Checkpointed)] == [10]
    assert_resumes(run, baseline, at=10)


@pytest.mark.parametrize("lost", soak_but([0, 1], 0))
def test_node_and_all_other_ranks_lost(
    lost: int, job: Callable[..., Job], baseline: Record
) -> None:
    """Any node that is left has a snapshot of the job's state."""
    run = job(*PAUSE_ALL, nodes=2, policy=LAST_WORDS)
    run.wait_pause(12)
    run.kill_node(lost)
    assert run.end().outcome == "failed"
    assert_resumes(run, baseline, at=10)


def test_stopped(job: Callable[..., Job], baseline: Record) -> None:
    """A job that is told to end, as before a machine goes down, leaves last words."""
    run = job(*PAUSE_ALL, nodes=2)
    run.wait_pause(12)
    os.kill(run.coordinator.pid, signal.SIGTERM)
    assert run.end().outcome == "stopped"
    assert_resumes(run, baseline, at=10)


def test_a_second_signal_does_not_wait(job: Callable[..., Job], baseline: Record) -> None:
    """A store that does not answer holds up last words, but not whoever wants the job gone."""
    run = job(*PAUSE_ALL, nodes=2)
    run.wait_pause(12)
    store = Path(run.spec.checkpoint_store)
    store.mkdir()
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(run.coordinator.pid, signal.SIGTERM)
        run.wait_event(journal.LastWords)
        os.kill(run.coordinator.pid, signal.SIGTERM)
        ended = run.end()
        assert run.leftovers() == []
    assert ended.outcome == "stopped"
    assert ended.reason.endswith("last words: the job was ended before they were written")
    assert_resumes(run, baseline, at=0)


def test_not_allowed(job: Callable[..., Job], baseline: Record) -> None:
    """Without `dump` in the policy nothing is written that was not asked for."""
    run = job(Fault(1, "forward", step=12, do="raise"), policy=Policy(strategies=INNER))
    assert run.end().outcome == "failed"
    assert run.checkpoints() == []
    assert_resumes(run, baseline, at=0)
