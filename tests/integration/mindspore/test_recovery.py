"""Faults that the processes of MindSpore ranks survive, with repairs in place."""

from __future__ import annotations

import os
import signal

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import MindSporeJob, assert_same, needs_mindspore
from mindspore_jobs.rows import Ended, Row, meet

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
RANKS = 3


def replace_coordinator(job: MindSporeJob) -> None:
    """Kill the coordinator while the ranks wait, and wait for the next one."""
    endpoint = job.directory.endpoint()
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGKILL)
    job.wait(lambda: job.directory.endpoint() not in (None, endpoint), "another coordinator")
    job.wait(lambda: len(job.events_of(journal.Decided)) == len(ROWS), "its decision")


# A damaged rank gets its state from a peer. The ranks keep their states for the next coordinator;
# they may arrive only at the end of the training.
ROWS = [
    Row("uce of rank 2", 3, InjectionKind.UCE, (2,)),
    Row("uce of rank 0", 9, InjectionKind.UCE, (0,)),
    Row("torn update of rank 1", 17, InjectionKind.TORN_UPDATE, (1,)),
    Row("lost coordinator", 24, act=replace_coordinator, closes=False),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the job after all faults."""
    return meet(MindSporeJob(tmp_path_factory.mktemp("job"), ranks=RANKS), ROWS)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_fault_costs_no_process_and_no_step(ended: Ended, row: Row) -> None:
    ended.check(row)


def test_the_training_is_that_of_an_undisturbed_run(ended: Ended, baseline: Baseline) -> None:
    ended.check_end()
    # The next coordinator keeps the scheduler. Otherwise ranks cannot unregister, and one may hang.
    assert "Failed to unregister" not in (ended.job.folder / "output").read_text()
    assert_same(ended.job, baseline(RANKS))
