"""Runs that wait, are skipped, or never begin: no run is lost, and no two jobs share a device."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid4

import acts
import pytest
from prefect.flow_runs import resume_flow_run, suspend_flow_run
from prefect.states import Pending, Scheduled
from prefect_side import until
from served_runs import ServedRuns, serving_runs

from rekindle.cli.setup import automations
from rekindle.recovery.journal.journal import JobStarted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

NAME = "queued"
FLOWS = ["train"]
FIRST, SECOND, STUCK = "first", "second", "stuck"
SOON_S = 10.0  # Prefect accepts no shorter time


class Queue:
    """Runs of the train flow, with the automations of Rekindle. Two jobs need the same device."""

    def __init__(self, served: ServedRuns) -> None:
        self.served = served
        rescue = served.deployment("rescue")
        for each in (
            automations.crash_pending_runs(FLOWS, SOON_S),
            automations.rescue_runs(uuid4(), FLOWS),  # each action fails
            automations.rescue_runs_again(rescue, FLOWS, SOON_S),
        ):
            served.client.create_automation(each)
        self.stuck = served.start("train", Pending(), job=served.job(STUCK))
        self.first = served.start("train", job=served.job(FIRST, devices=["a"]))
        served.until_training(FIRST)
        self.second = served.start("train", job=served.job(SECOND, devices=["b", "a"]))
        self.nights = self._pile_up()

    def _pile_up(self) -> list[UUID]:
        """Create the runs of two nights, which are both due, the newest first."""
        runs = []
        for night in (1, 2):
            due = datetime.now(timezone.utc) - timedelta(days=night)
            job = self.served.job(f"night-{night}", only_newest=True)
            (self.served.home / job["name"]).touch()  # it ends at once
            late = Scheduled(scheduled_time=due)
            runs.append(self.served.start("train/nights", late, job=job))
        return runs


def a_run_waits_for_a_device_and_its_state_says_for_whom(queue: Queue) -> None:
    """The job has the device, also after its flow's process was killed."""
    served = queue.served
    state = served.until_state(queue.second, "AwaitingDevices")
    assert state.message == "Job second-job waits for the device a, which job first-job holds"
    (flow,) = served.flow_processes(queue.first)
    flow.kill()
    until(lambda: "Rescheduling" in served.states(queue.first), "the first run is run again")
    assert served.state(queue.second).name == "AwaitingDevices"
    assert not served.count(SECOND, JobStarted)


def a_waiting_run_can_be_suspended(queue: Queue) -> None:
    """It ends without a job, and a suspended run does not wait."""
    suspend_flow_run(flow_run_id=queue.second)
    queue.served.until_left(queue.second)
    assert queue.served.state(queue.second).name == "Suspended"
    assert not queue.served.count(SECOND, JobStarted)
    resume_flow_run(queue.second)
    queue.served.until_state(queue.second, "AwaitingDevices")


def the_end_of_the_job_frees_the_device(queue: Queue) -> None:
    """The waiting run launches its job when the first one has ended."""
    served = queue.served
    (served.home / FIRST).touch()
    served.until_state(queue.first, "Completed")
    served.until_training(SECOND)
    served.until_state(queue.second, "Running")
    (served.home / SECOND).touch()
    served.until_state(queue.second, "Completed")


def only_the_newest_of_the_runs_that_piled_up_trains(queue: Queue) -> None:
    """The older one is Skipped, and names the newest. A person can run it nevertheless."""
    newest, older = queue.nights
    served = queue.served
    served.until_state(newest, "Completed")
    state = served.until_state(older, "Skipped")
    assert state.is_cancelled()
    name = served.client.read_flow_run(newest).name
    assert state.message == f"Flow run {name} ({newest}) is newer, and trains"
    served.retry(older)
    served.until_state(older, "Completed")


def a_run_that_stays_pending_is_rescued(queue: Queue) -> None:
    """Its worker died before it began. The rescue runs although the first action has failed."""
    served = queue.served
    served.until_training(STUCK)
    assert served.states(queue.stuck)[:3] == ["Pending", "Crashed", "Rescheduling"]
    (served.home / STUCK).touch()
    served.until_state(queue.stuck, "Completed")


ACTS = [
    a_run_waits_for_a_device_and_its_state_says_for_whom,
    a_waiting_run_can_be_suspended,
    the_end_of_the_job_frees_the_device,
    only_the_newest_of_the_runs_that_piled_up_trains,
    a_run_that_stays_pending_is_rescued,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Serve all flows by one runner, and begin all runs at once."""
    with serving_runs(prefect_api, tmp_path_factory.mktemp(NAME), NAME) as served:
        try:
            yield acts.Played(ACTS, Queue(served))
        finally:
            for automation in served.client.read_automations():
                served.client.delete_automation(automation.id)


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_queued_runs(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
