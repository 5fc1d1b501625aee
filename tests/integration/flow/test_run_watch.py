"""A flow run that ends for good stops its job with a final checkpoint, and keeps its state.

Each row of the table "Who ends the job" in docs/deploy/flow.md has a test here, or in
test_adoption.py and test_resuming.py.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from uuid import UUID

import acts
import psutil
import pytest
from flow_jobs import SCRIPTS
from prefect.flow_runs import resume_flow_run, suspend_flow_run
from prefect.states import Cancelling, Failed
from prefect_side import until
from served_runs import ServedRuns, serving_runs

from rekindle.recovery.journal.journal import FinalCheckpoint, FirstStep, Formed

pytestmark = pytest.mark.timeout(900)

# Names of the jobs: the run of the first one meets one end after the other.
STEPS, GIVEN_UP, LIMITED, FIRST, SECOND = "steps", "given-up", "limited", "first", "second"


class Runs:
    """Runs of the train flow and of its callers."""

    def __init__(self, served: ServedRuns) -> None:
        self.served = served
        steps = served.job(STEPS, script=str(SCRIPTS / "steps.py"), snapshot_every=2)
        steps["arguments"] = [str(served.home / STEPS), "9000"]
        self.steps = served.start("train", job=steps)
        self.given_up = served.start("train", job=served.job(GIVEN_UP))
        self.limited = served.start(
            "limited", job=served.job(LIMITED), limit=str(served.home / "limit")
        )
        self.caller = served.start("caller", jobs=[served.job(FIRST), served.job(SECOND)])
        served.until_training(STEPS, kind=FirstStep)

    def resumes(self, attempts: int) -> None:
        """Check that this attempt continues from the final checkpoint of the one before it."""
        left = self.served.newest(STEPS, FinalCheckpoint)
        self.served.until_training(STEPS, attempts, FirstStep)
        assert left.path
        assert self.served.newest(STEPS, Formed).step == left.step > 0

    def subflow(self, name: str) -> UUID:
        """Return the flow run that has launched a job of the parent."""
        callers = self.served.directory(name).path / "callers"
        until(callers.exists, "the run is noted")
        return UUID(callers.read_text().split()[1])


def suspend_stops_the_ranks_and_resume_continues(runs: Runs) -> None:
    """Suspend ends all processes with a final checkpoint. Resume starts the next attempt from it.

    The state stays Suspended in between.
    """
    suspend_flow_run(flow_run_id=runs.steps)
    ended = runs.served.until_ended(STEPS)
    assert ended.reason.startswith("stopped by the suspension of flow run")
    runs.served.until_left(runs.steps)
    assert runs.served.state(runs.steps).name == "Suspended"
    resume_flow_run(runs.steps)
    runs.resumes(2)


def a_run_that_a_person_sets_to_failed_keeps_that_state(runs: Runs) -> None:
    """The job stops with a final checkpoint, and the state keeps the person's message."""
    runs.served.client.set_flow_run_state(runs.steps, Failed(message="no use"), force=True)
    ended = runs.served.until_ended(STEPS, 2)
    assert ended.reason.startswith("stopped by the state Failed of flow run")
    runs.served.until_left(runs.steps)
    state = runs.served.state(runs.steps)
    assert (state.name, state.message) == ("Failed", "no use")
    runs.served.retry(runs.steps)
    runs.resumes(3)


def sigterm_to_all_processes_writes_and_the_rerun_continues(runs: Runs) -> None:
    """systemd and containers send SIGTERM to each process. The job writes a final checkpoint.

    The hooks schedule the flow run again, and the next attempt continues from the checkpoint.
    """
    flow = runs.served.flow_processes(runs.steps)
    for each in [*runs.served.processes(STEPS), *flow]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    runs.served.until_training(STEPS, 4, FirstStep)
    runs.resumes(4)
    assert "Rescheduling" in runs.served.states(runs.steps)


def a_deleted_run_stops_its_job(runs: Runs) -> None:
    """The job of a deleted run stops with a final checkpoint, and the flow's process ends."""
    runs.served.client.delete_flow_run(runs.steps)
    ended = runs.served.until_ended(STEPS, 4)
    assert ended.reason.startswith("stopped by the deletion of flow run")
    assert runs.served.newest(STEPS, FinalCheckpoint).path
    runs.served.until_left(runs.steps)


def suspend_and_then_cancel_stays_cancelled(runs: Runs) -> None:
    """Prefect cancels a suspended run without a hook. Its job stops, and the state stays."""
    runs.served.until_training(GIVEN_UP)
    suspend_flow_run(flow_run_id=runs.given_up)
    runs.served.client.set_flow_run_state(runs.given_up, Cancelling())
    assert runs.served.state(runs.given_up).name == "Cancelled"
    assert runs.served.until_ended(GIVEN_UP).outcome == "stopped"
    runs.served.until_left(runs.given_up)
    assert runs.served.states(runs.given_up)[-2:] == ["Suspended", "Cancelled"]


def the_time_limit_of_a_parent_stops_the_job(runs: Runs) -> None:
    """The parent ends as TimedOut, and the job of its subflow does not train without an owner."""
    runs.served.until_training(LIMITED)
    (runs.served.home / "limit").touch()
    ended = runs.served.until_ended(LIMITED)
    assert ended.outcome == "stopped"
    assert "the time limit of flow run" in ended.reason
    until(lambda: runs.served.state(runs.limited).is_final(), "the parent has ended")
    assert runs.served.state(runs.limited).name == "TimedOut"


def a_subflow_that_a_person_sets_to_failed_fails_the_call(runs: Runs) -> None:
    """The call in the parent raises the person's message; the parent continues."""
    runs.served.until_training(FIRST)
    run = runs.subflow(FIRST)
    runs.served.client.set_flow_run_state(run, Failed(message="no use"), force=True)
    assert runs.served.until_ended(FIRST).outcome == "stopped"
    runs.served.until_training(SECOND)
    state = runs.served.state(run)
    assert (state.name, state.message) == ("Failed", "no use")
    assert runs.served.state(runs.caller).name == "Running"


def a_cancelled_parent_stops_the_job_of_its_subflow(runs: Runs) -> None:
    """The job of the subflow stops with the parent, and neither run trains again."""
    run = runs.subflow(SECOND)
    runs.served.client.set_flow_run_state(runs.caller, Cancelling())
    assert runs.served.until_ended(SECOND).outcome == "stopped"
    until(lambda: runs.served.state(runs.caller).is_cancelled(), "the parent is cancelled")
    runs.served.until_left(runs.caller)
    assert not runs.served.state(run).is_running()


ACTS = [
    suspend_stops_the_ranks_and_resume_continues,
    suspend_and_then_cancel_stays_cancelled,
    the_time_limit_of_a_parent_stops_the_job,
    a_subflow_that_a_person_sets_to_failed_fails_the_call,
    a_cancelled_parent_stops_the_job_of_its_subflow,
    a_run_that_a_person_sets_to_failed_keeps_that_state,
    sigterm_to_all_processes_writes_and_the_rerun_continues,
    a_deleted_run_stops_its_job,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Serve all flows by one runner, and begin all runs at once."""
    with serving_runs(prefect_api, tmp_path_factory.mktemp("obeyed"), "obeyed") as served:
        yield acts.Played(ACTS, Runs(served))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_run_watch(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
