"""A job continues after the end of its flow process, and each rerun adopts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import acts
import psutil
import pytest
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Cancelling
from prefect_side import ending_jobs, serve

from rekindle.flows.train import train
from rekindle.protocol.http_views import RankView
from rekindle.recovery.journal.journal import Ended, JobStarted, RanksStarted
from rekindle.tasks.hooks.cancellation import stop_job

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("scripts") / "gated.py"
ENDS = ("Crashed", "Failed", "Cancelled", "Rescheduling")
NAME = "adopted"


class Adopted:
    """A flow run with its own runner, and its job of two nodes."""

    def __init__(self, api: str, home: Path) -> None:
        self.api, self.home = api, home
        self.gate = home / "gate"
        self.closing = contextlib.ExitStack()
        self.runner = self.closing.enter_context(serve(api, home, NAME))
        self.run = self.runner.start(
            script=str(SCRIPT), arguments=[str(self.gate), "exit"], nodes=2
        )
        self.run.until(lambda: self.run.count(RanksStarted) == 2, "the ranks run")
        self.run.process()
        self.ranks = self.look()

    def serve(self) -> None:
        """Start a runner that replaces the earlier one."""
        self.closing.close()
        self.runner = self.closing.enter_context(serve(self.api, self.home, NAME))
        self.run.client = self.runner.client

    def look(self) -> list[RankView]:
        """Return the coordinator's view of the ranks."""
        return list(self.run.status().ranks)

    def ended(self) -> list[str]:
        """Return the states after each end of a flow process."""
        return [name for name in self.run.states() if name in ENDS]


def a_second_process_of_the_same_flow_run_is_refused(adopted: Adopted) -> None:
    """A second process of the same flow run fails; its log names the first process.

    The job and the flow run do not change.
    """
    run, before, first = adopted.run, adopted.run.status(), adopted.run.process()
    with serve(adopted.api, adopted.home, NAME):
        run.retry()
        run.until(lambda: "Failed" in run.task_states("supervise"), "the second one is refused")
        run.until(lambda: f"process {first.pid} on" in run.logs(), "its log names the first one")
        run.until(
            lambda: "This process does not change the flow run" in run.logs(),
            "it does not change the flow run",
        )
    assert run.status() == before
    assert run.state().name == "Running"
    assert sorted(run.task_states("supervise")) == ["Failed", "Running"]


def a_stopped_flow_process_loses_the_job(adopted: Adopted) -> None:
    """A stopped flow process keeps its connection, but not the lease: a rerun adopts the job.

    When the stopped process continues, it finds the new holder, and changes nothing.
    """
    run, first = adopted.run, adopted.run.process()
    first.suspend()
    with serve(adopted.api, adopted.home, NAME):
        run.retry()
        holder = run.until_rerun(first.pid)
        assert adopted.look() == adopted.ranks
        first.resume()
        run.until(lambda: not first.is_running(), "the end of the first process")
        assert run.status().holder.endswith(f"process {holder} on {socket.gethostname()}")
    run.until_left()
    if not run.state().is_scheduled():
        run.retry()
    run.until_rerun(holder)
    assert adopted.look() == adopted.ranks


def end_flow(adopted: Adopted, number: signal.Signals) -> None:
    run, flow, before = adopted.run, adopted.run.process(), adopted.ended()
    with adopted.runner.unaware():
        flow.send_signal(number)
        run.until_left()
        assert adopted.look() == adopted.ranks
    run.until_rerun(flow.pid)
    assert adopted.look() == adopted.ranks
    assert adopted.ended() == [*before, "Crashed", "Rescheduling"]


def a_flow_process_that_is_killed_leaves_the_job(adopted: Adopted) -> None:
    """After SIGKILL of the flow process the same ranks continue, and a rerun adopts them."""
    end_flow(adopted, signal.SIGKILL)


def a_flow_process_that_is_terminated_leaves_the_job(adopted: Adopted) -> None:
    """After SIGTERM of the flow process the same ranks continue, and a rerun adopts them."""
    end_flow(adopted, signal.SIGTERM)


def a_lost_worker_keeps_the_job(adopted: Adopted) -> None:
    """After SIGKILL of runner and flow, Prefect has no report; a user's rerun adopts the job."""
    run, flow, before = adopted.run, adopted.run.process(), adopted.ended()
    psutil.Process(adopted.runner.pid).kill()
    flow.kill()
    run.until_left()
    assert run.state().name == "Running"
    assert adopted.ended() == before
    adopted.serve()
    run.retry()
    run.until_rerun(flow.pid)
    assert adopted.look() == adopted.ranks


def a_runner_that_shuts_down_keeps_the_job(adopted: Adopted) -> None:
    """SIGTERM of the serving process ends the flow run, and the job continues."""
    run, flow, before = adopted.run, adopted.run.process(), adopted.ended()
    os.kill(adopted.runner.pid, signal.SIGTERM)
    run.until(lambda: len(adopted.ended()) > len(before), "the flow run's process has ended")
    run.until_left()
    # Some runners crash their flow runs at shutdown; others cancel them with this message.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_HOME", str(adopted.home))
        with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
            flow_run = run.client.read_flow_run(run.id)
            stop_job(train, flow_run, Cancelling(message="Runner is shutting down."))
    assert adopted.look() == adopted.ranks
    adopted.serve()
    if not run.state().is_scheduled():
        run.retry()
    run.until_rerun(flow.pid)
    assert adopted.look() == adopted.ranks


def the_job_succeeds(adopted: Adopted) -> None:
    """The job succeeds in one attempt."""
    adopted.gate.touch()
    adopted.run.until_state("Completed")
    assert adopted.run.count(JobStarted) == 1
    ended = adopted.run.history()[-1]
    assert isinstance(ended, Ended)
    assert ended.outcome == "succeeded"


def a_succeeded_job_is_not_run_again(adopted: Adopted) -> None:
    """A rerun of a completed flow run reports the job's end and starts no process."""
    before = adopted.run.history()
    adopted.run.retry()
    adopted.run.until_state("Completed", 2)
    assert adopted.run.history() == before


ACTS = [
    a_second_process_of_the_same_flow_run_is_refused,
    a_stopped_flow_process_loses_the_job,
    a_flow_process_that_is_killed_leaves_the_job,
    a_flow_process_that_is_terminated_leaves_the_job,
    a_lost_worker_keeps_the_job,
    a_runner_that_shuts_down_keeps_the_job,
    the_job_succeeds,
    a_succeeded_job_is_not_run_again,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job, which loses its flow process five times."""
    home = tmp_path_factory.mktemp("adopted")
    with ending_jobs(home):
        adopted = Adopted(prefect_api, home)
        with adopted.closing:
            yield acts.Played(ACTS, adopted)


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_adoption(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
