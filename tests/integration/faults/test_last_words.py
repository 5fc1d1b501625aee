"""A job that ends without success leaves last words, and the next attempt begins with them.

One job ends in many ways: each attempt begins with what the one before it has left.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import RANKS
from training_jobs.acts import end, kill, lose
from training_jobs.injection import Fault
from training_jobs.job import LIMIT_S, Job
from training_jobs.record import Record
from training_jobs.scenes import Attempts, Ended, Row, paused
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.policy import INNER, Policy, Strategy

pytestmark = pytest.mark.timeout(400)  # the first test waits for all attempts
STEPS = 40
ANY = Policy(hang_timeout_s=LIMIT_S)
SILENT = Policy(hang_timeout_s=LIMIT_S, strategies=INNER)
LAST_WORDS = Policy(hang_timeout_s=LIMIT_S, strategies=(Strategy.DUMP,))

Endings = dict[str, Ended]


def raises(step: int) -> Row:
    """Return the row of a script that raises an error."""
    return Row("raises", step, (Fault(1, "forward", step, life=0, do="raise"),))


def end_twice(job: Job) -> list[str]:
    """End a job whose store does not answer; return the processes that it leaves."""
    store = Path(job.spec.checkpoint_store)
    store.mkdir(exist_ok=True)
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end(job)
        job.wait_event(journal.LastWords)
        end(job)
        job.end()
        return job.leftovers()


def end_paused(job: Job) -> None:
    """End the job while all ranks pause: released ranks reach the next snapshot."""
    end(job)
    job.end()


@pytest.fixture(scope="module", params=soak_but([0, 1], 0))
def endings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """All attempts by the way in which they end; the parameter is the node that is lost."""
    ends = {
        "not allowed": (raises(12), SILENT),
        "second signal": (paused("second signal", 12, end_twice), ANY),
        "all ranks are dead": (paused("killed", 12, kill(*range(RANKS))), LAST_WORDS),
        "script raises": (raises(17), LAST_WORDS),
        "node and all other ranks lost": (paused("lost", 22, lose(request.param)), LAST_WORDS),
        "stopped": (paused("stopped", 27, end_paused), ANY),
    }
    found = {}
    with Attempts(tmp_path_factory.mktemp("run"), nodes=2, steps=STEPS) as run:
        for name, (row, policy) in ends.items():
            found[name] = run.meet(row, policy=policy)
            found[name].seen["checkpoints"] = run.job.checkpoints()
        found["none"] = run.meet(policy=ANY)
    return found


def written(attempt: Ended) -> list[int]:
    """Return the steps of the checkpoints that an attempt has written."""
    return [event.step for event in attempt.of(journal.Checkpointed)]


def test_not_allowed(endings: Endings) -> None:
    """Without `dump` in the policy nothing is written that was not asked for."""
    attempt = endings["not allowed"]
    attempt.check_outcome("failed")
    assert attempt.seen["checkpoints"] == []
    assert endings["second signal"].began() == (0, {"fresh": RANKS})


def test_a_second_signal_does_not_wait(endings: Endings) -> None:
    """A store that does not answer delays last words, but not the second order to end."""
    attempt = endings["second signal"]
    ended = attempt.check_outcome("stopped")
    assert attempt.seen["second signal"] == []
    assert ended.reason.endswith("last words: the job was ended before they were written")
    assert endings["all ranks are dead"].began() == (0, {"fresh": RANKS})


def test_all_ranks_are_dead(endings: Endings) -> None:
    """The agents' snapshots outlive their ranks."""
    attempt = endings["all ranks are dead"]
    attempt.check_outcome("failed")
    (incident,) = attempt.incidents
    assert incident.strategy is Strategy.DUMP
    assert incident.reason.endswith("last words: the snapshot of step 10 is to be written")
    assert written(attempt) == [10]
    assert endings["script raises"].began() == (10, {"checkpoint": RANKS})


def test_script_raises(endings: Endings) -> None:
    """A run that its script ends loses no more than the snapshot interval."""
    attempt = endings["script raises"]
    attempt.check_outcome("failed")
    assert written(attempt) == [15]
    assert endings["node and all other ranks lost"].began() == (15, {"checkpoint": RANKS})


def test_node_and_all_other_ranks_lost(endings: Endings) -> None:
    """Any node that is left has a snapshot of the job's state."""
    endings["node and all other ranks lost"].check_outcome("failed")
    assert endings["stopped"].began() == (20, {"checkpoint": RANKS})


def test_stopped(endings: Endings) -> None:
    """A job that is ended, as before a machine goes down, leaves last words."""
    endings["stopped"].check_outcome("stopped")
    assert endings["none"].began() == (25, {"checkpoint": RANKS})


def test_end(endings: Endings, baseline_of: Callable[..., Record]) -> None:
    """However the attempts ended, the training is the uninterrupted one, to the bit."""
    endings["none"].check_end(baseline_of("ddp", steps=STEPS))
