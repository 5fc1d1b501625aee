"""Faults after which all MindSpore ranks get new processes, or return to a snapshot.

The job's callbacks depend on earlier epochs: the learning rate falls after the third epoch if the
callback has seen the two earlier ones.
"""

from __future__ import annotations

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import MindSporeJob, assert_same, needs_mindspore
from mindspore_jobs.rows import Ended, Row, meet

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(600)]
RESTART = Strategy.RESTART


def kill_scheduler(job: MindSporeJob) -> None:
    """Kill MindSpore's scheduler while the ranks wait.

    MindSpore itself would end the ranks much later.
    """
    decided = len(job.events_of(journal.Decided))
    job.scheduler().kill()
    job.wait(lambda: len(job.events_of(journal.Decided)) > decided, "a decision")


ROWS = [
    Row("rank 0 killed as its step begins", 3, strategy=RESTART),
    Row("rank 0 killed 2 ms later", 6, strategy=RESTART),
    Row("all states damaged", 11, InjectionKind.UCE, (0, 1), back_to=8),
    Row("rank 0 killed 6 ms later", 13, strategy=RESTART),
    Row(
        "hang of rank 1",
        16,
        InjectionKind.HANG,
        (1,),
        strategy=Strategy.HANG_RESTART,
        message="rank 1 makes no progress",
    ),
    Row("rank 1 killed in the last step of an epoch", 18, strategy=RESTART),
    Row("scheduler killed", 21, act=kill_scheduler, strategy=RESTART),
    Row("rank 0 killed 4 ms later", 22, strategy=RESTART),
]
# At the end of an epoch the callbacks reduce a value over all ranks. A rank that waits there for a
# killed rank has no state of a step. The kill in the last step of an epoch therefore occurs at the
# start of the step.
KILLS = ("0:4:0", "0:7:0.002", "0:14:0.006", "1:19:0", "0:23:0.004")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the job after all faults."""
    script = ("--plateau", *(word for kill in KILLS for word in ("--die", kill)))
    options = ("--max-restarts", "6", "--snapshot-every", "8")
    job = MindSporeJob(tmp_path_factory.mktemp("job"), *script, options=options)
    return meet(job, ROWS)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_state_comes_from_a_final_checkpoint_or_a_snapshot(ended: Ended, row: Row) -> None:
    """Agents of live ranks write a final checkpoint, and no step is lost.

    Without one, training continues from a snapshot.
    """
    ended.check(row)


def test_the_training_is_that_of_an_undisturbed_run(ended: Ended, baseline: Baseline) -> None:
    """The training equals an undisturbed run.

    A killed rank may have done steps without writing their losses.
    """
    ended.check_end()
    assert_same(ended.job, baseline(2, "--plateau"), unwritten={0: 4, 1: 1})
