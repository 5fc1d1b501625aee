"""A job that ends without success writes a final checkpoint; the next attempt starts from it.

One job ends in many ways. Each attempt starts from the state that the earlier one has left.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import RANKS
from training_jobs.acts import end, kill, lose
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import LIMIT_S, Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import paused
from training_jobs.selection import soak_but

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import INNER, Policy, Strategy

pytestmark = pytest.mark.timeout(400)  # the first test waits for all attempts
STEPS = 40
ANY = Policy(hang_timeout_s=LIMIT_S, max_restarts=0)
SILENT = Policy(hang_timeout_s=LIMIT_S, strategies=INNER)
FINAL_CHECKPOINT = Policy(hang_timeout_s=LIMIT_S, strategies=(Strategy.DUMP,))


def raises(step: int) -> Row:
    """Return the row of a script that raises an error."""
    return Row("raises", step, (Fault(1, "forward", step, life=0, do="raise"),))


def end_twice(job: Job) -> list[str]:
    """End a job twice while its store does not answer; return the remaining processes."""
    store = Path(job.spec.checkpoint_store)
    store.mkdir(exist_ok=True)
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end(job)
        job.wait_event(journal.FinalCheckpoint)
        end(job)  # a scheduler and a launcher may send the same signal
        os.kill(job.coordinator.pid, signal.SIGINT)
        job.end()
        return job.leftovers()


def end_paused(job: Job) -> None:
    """End the job while all ranks pause: released ranks would reach the next snapshot."""
    end(job)
    job.end()


def ends(name: str, row: Row, policy: Policy, outcome: str = "failed") -> Attempt:
    """Return an attempt that its row ends, with its checkpoints."""
    return Attempt((row,), {"policy": policy}, outcome, name=name, after=Job.checkpoints)


@pytest.fixture(scope="module", params=soak_but([0, 1], 0))
def endings(request: pytest.FixtureRequest, ended_of: EndedOf) -> Ended:
    """Run all attempts, named by their ends; the parameter is the lost node."""
    attempts = (
        ends("not allowed", raises(12), SILENT),
        ends("second signal", paused("second signal", 12, end_twice), ANY, "stopped"),
        ends("all ranks are dead", paused("killed", 12, kill(*range(RANKS))), FINAL_CHECKPOINT),
        ends("script raises", raises(17), FINAL_CHECKPOINT),
        ends(
            "node and all other ranks lost",
            paused("lost", 22, lose(request.param)),
            FINAL_CHECKPOINT,
        ),
        ends("stopped", paused("stopped", 27, end_paused), ANY, "stopped"),
        Attempt(settings={"policy": ANY}, name="none"),
    )
    return ended_of(Plan("endings", attempts, steps=STEPS, settings={"nodes": 2}))


def written(attempt: Ended) -> list[int]:
    """Return the steps of the checkpoints that an attempt has written."""
    return [event.step for event in attempt.of(journal.Checkpointed)]


def test_not_allowed(endings: Ended) -> None:
    """Without `dump` in the policy the job writes no final checkpoint."""
    endings.only("not allowed").check_ends()
    assert endings.after["not allowed"] == []
    assert endings.only("second signal").began() == (0, {"fresh": RANKS})


def test_a_second_signal_does_not_wait(endings: Ended) -> None:
    """A store that does not answer delays the final checkpoint, but not a second stop."""
    attempt = endings.only("second signal")
    [end] = attempt.check_ends()
    assert attempt.seen["second signal"] == []
    assert end.reason.endswith(
        "final checkpoint: a second stop ended the job before its nodes wrote it"
    )
    after = endings.only("all ranks are dead")
    assert after.began() == (0, {"fresh": RANKS})
    [lost] = after.between
    assert lost.resumed_at == 0
    assert lost.steps_lost in (11, 12)  # of the pause at step 12


def test_all_ranks_are_dead(endings: Ended) -> None:
    """The agents write their snapshots after all ranks have been killed."""
    attempt = endings.only("all ranks are dead")
    attempt.check_ends()
    (incident,) = attempt.incidents
    assert incident.strategy is Strategy.DUMP
    assert incident.reason.endswith("final checkpoint: the nodes write the snapshot of step 10")
    assert written(attempt) == [10]
    assert endings.only("script raises").began() == (10, {"checkpoint": RANKS})


def test_script_raises(endings: Ended) -> None:
    """A job that ends by a script error loses at most the snapshot interval."""
    attempt = endings.only("script raises")
    attempt.check_ends()
    assert written(attempt) == [15]
    assert endings.only("node and all other ranks lost").began() == (15, {"checkpoint": RANKS})


def test_node_and_all_other_ranks_lost(endings: Ended) -> None:
    """Each node that is left has a snapshot of the job's state."""
    endings.only("node and all other ranks lost").check_ends()
    assert endings.only("stopped").began() == (20, {"checkpoint": RANKS})


def test_stopped(endings: Ended) -> None:
    """A stopped job writes a final checkpoint, for example before a machine is shut down."""
    endings.only("stopped").check_ends()
    assert endings.only("none").began() == (25, {"checkpoint": RANKS})


def test_end(endings: Ended, baseline_of: Callable[..., Record]) -> None:
    """After all these ends the training equals the uninterrupted one, bit by bit."""
    endings.only("none").check_end(baseline_of("ddp", steps=STEPS))
