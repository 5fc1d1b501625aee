"""A cancelled job, or one without processes, resumes from its checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator

import acts
import psutil
import pytest
from flow_jobs import TrainingRun, kill_tree
from prefect_side import ending_jobs, process, serve

from rekindle import names
from rekindle.recovery.journal.journal import (
    Checkpointed,
    Ended,
    FaultSeen,
    FinalCheckpoint,
    Formed,
    JobStarted,
    NodeJoined,
)

pytestmark = pytest.mark.timeout(900)

_CANCELLED = """
import sys
from prefect.client.orchestration import get_client
from prefect.states import Cancelling
from rekindle.flows.train import train
from rekindle.tasks.hooks.cancellation import stop_job
with get_client(sync_client=True) as client:
    stop_job(train, client.read_flow_run(sys.argv[1]), Cancelling())
"""


def until_checkpointed(job: TrainingRun) -> int:
    """Wait for one more checkpoint; return its step."""
    count = job.run.count(Checkpointed)
    job.run.until(lambda: job.run.count(Checkpointed) > count, "there is a checkpoint")
    step: int = job.newest(Checkpointed).step
    return step


def a_cancelled_job_is_stopped_and_a_retry_waits_for_its_final_checkpoint(job: TrainingRun) -> None:
    """A retry does not adopt a job that ends: the next attempt starts from its final checkpoint."""
    run = job.run
    until_checkpointed(job)
    run.process()
    with (run.directory.path / "checkpoints" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # writes wait, as in a slow store
        written = max(e.step for e in run.history() if isinstance(e, Checkpointed))
        run.until(lambda: run.status().finished >= written + 9, "snapshots are newer than that")
        run.cancel()
        run.until(lambda: run.count(FinalCheckpoint) == 1, "final checkpoint begin")
        assert run.until_final().name == "Cancelled"
        run.retry()
        run.until(lambda: "Running" in run.task_states("launch"), "the retry looks for the job")
        assert run.count(JobStarted) == 1
    job.until_training()
    ended = next(e for e in run.history() if isinstance(e, Ended))
    assert ended.outcome == "stopped"
    assert ended.reason.startswith("stopped by the cancellation of flow run")
    assert [e.attempt for e in run.history() if isinstance(e, JobStarted)] == [1, 2]
    left = next(e for e in run.history() if isinstance(e, FinalCheckpoint) and e.path)
    assert job.newest(Formed).step == left.step > written
    run.until(lambda: run.task_states("restore") == ["Completed"], "the restore is told")


def a_job_of_which_nothing_is_left_resumes_from_its_checkpoint(job: TrainingRun) -> None:
    """After the end of flow, coordinator, agent and rank a rerun starts from the checkpoint."""
    run = job.run
    written = until_checkpointed(job)
    with job.runner.unaware():
        run.process().kill()
        kill_tree(job.coordinator())
        kill_tree(job.newest(NodeJoined).pid)
    job.until_training()
    assert job.newest(Formed).step >= written
    assert "all agents of the job ended" in job.newest(FaultSeen).fault.message


def cancelling_ends_a_job_that_has_lost_its_coordinator_too(job: TrainingRun) -> None:
    """A cancellation stops the ranks of a job without runner, flow and coordinator.

    Another coordinator stops them. The report of the run names the newest checkpoint, with its
    machine.
    """
    run, flow = job.run, job.run.process()
    psutil.Process(job.runner.pid).kill()
    flow.kill()
    run.until_left()
    rank = run.status().ranks[0].pid
    os.kill(job.coordinator(), signal.SIGKILL)
    home = str(job.runner.home)
    env = {"PREFECT_API_URL": str(run.client.api_url), "PREFECT_HOME": home, "REKINDLE_HOME": home}
    log = job.runner.home / "hook.log"
    ends = run.count(Ended)
    with process([sys.executable, "-c", _CANCELLED, str(run.id)], log, **env) as hook:
        run.until(lambda: hook.poll() is not None, "the hook has run")
        assert hook.returncode == 0, log.read_text()
        run.until(lambda: run.count(Ended) == ends + 1, "the job has ended")
    assert job.newest(Ended).outcome == "stopped"
    run.until(lambda: not psutil.pid_exists(rank), "its rank has ended")
    report = run.directory.path / names.REPORT_FILE
    newest = f"`{socket.gethostname()}:{job.newest(Checkpointed).path}`"
    # The cancellation of the first attempt has written a report, too.
    run.until(lambda: report.exists() and newest in report.read_text(), "there is a report")
    assert f"Job {run.job_id} stopped after" in report.read_text()

    def is_shown() -> bool:
        with contextlib.suppress(ValueError):  # Prefect has none yet
            return newest in str(run.artifact("report").data)
        return False

    run.until(is_shown, "Prefect has the report")


ACTS = [
    a_cancelled_job_is_stopped_and_a_retry_waits_for_its_final_checkpoint,
    a_job_of_which_nothing_is_left_resumes_from_its_checkpoint,
    cancelling_ends_a_job_that_has_lost_its_coordinator_too,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job with its own runner, in two attempts."""
    home = tmp_path_factory.mktemp("resuming")
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_jobs(home))
        runner = stack.enter_context(serve(prefect_api, home, "resuming"))
        checkpoint = {"every": 5}
        job = TrainingRun(
            runner, home / "gate", steps=9000, checkpoint=checkpoint, snapshot_every=2
        )
        yield acts.Played(ACTS, job)


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_resuming(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
