"""Recovery hooks on a user's own flow and task: reruns within the budget, without duplicates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Scheduled
from prefect_side import process, until
from training_jobs.selection import soak_but

from rekindle.flows.train import train
from rekindle.recovery.policy.policy import Policy
from rekindle.tasks.hooks.rerun import recovery_hooks

pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).with_name("scripts") / "user_flows.py"
NAME = "hooks"
AGAIN = "Rescheduling"


class Runs:
    """Flow runs of the user's flows."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self.client = client

    def start(self, flow: str, **parameters: Any) -> UUID:
        """Schedule a run."""
        deployment = until(lambda: self._find(f"{flow}/{NAME}"), "the flow is served")
        return self.client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def _find(self, name: str) -> UUID | None:
        try:
            return self.client.read_deployment_by_name(name).id
        except ObjectNotFound:
            return None

    def states(self, run: UUID) -> list[State[object]]:
        """Return all states of a run, in order."""
        return sorted(self.client.read_flow_run_states(run), key=lambda one: one.timestamp)

    def until_completed(self, run: UUID) -> list[State[object]]:
        """Wait until the run has completed."""
        until(lambda: "Completed" in named(self.states(run)), "the run has completed")
        return self.states(run)

    def until_left(self, run: UUID, times: int = 1) -> list[State[object]]:
        """Wait until the hook has logged `times` times that it does not restart the run."""
        about = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))

        def is_logged() -> bool:
            messages = [log.message for log in self.client.read_logs(about)]
            return (
                sum(text.startswith("Rekindle does not restart this run: ") for text in messages)
                >= times
            )

        until(is_logged, f"the run is left as it ended, {times} times")
        return self.states(run)


def processes(notes: Path) -> list[str]:
    """Return the process of each call of the user's function."""
    return notes.read_text().split()


@pytest.fixture(scope="module")
def _serving(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("hooks")
    env = {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    with process([sys.executable, str(SCRIPT), NAME], home / "serve.log", **env):
        yield


@pytest.fixture
def runs(prefect_api: str, _serving: None) -> Iterator[Runs]:
    """Return the user's flows, served."""
    with SyncPrefectClient(prefect_api) as client:
        yield Runs(client)


def named(states: list[State[object]]) -> list[str]:
    """Return the names of the final states and of the scheduled reruns."""
    return [state.name or "" for state in states if state.is_final() or state.name == AGAIN]


# The way in which a run breaks, and the state of its end.
BREAKS = {"kill": "Crashed", "raise": "Failed", "terminate": "Crashed"}


def test_a_run_that_breaks_is_run_again(runs: Runs, prefect_api: str, tmp_path: Path) -> None:
    """After each end the hook schedules the run again, with a reason, in another process.

    The hook does not act twice on the same end.
    """
    notes = tmp_path / "notes"
    run = runs.start("breaks", notes=str(notes), ways=[*BREAKS, "end"])
    states = runs.until_completed(run)
    assert named(states) == [
        *(name for end in BREAKS.values() for name in (end, AGAIN)),
        "Completed",
    ]
    assert len(set(processes(notes))) == len(processes(notes)) == 4
    reasons = [state.message or "" for state in states if state.name == AGAIN]
    assert all(reason.startswith("Rekindle restarts this run: ") for reason in reasons)
    [failed] = [state for state in states if state.name == "Failed"]
    [hook] = recovery_hooks(Policy(max_restarts=0, max_reschedules=9))["on_failure"]
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        hook(train, runs.client.read_flow_run(run), failed)
    assert [state.id for state in runs.states(run)] == [state.id for state in states]


@pytest.mark.parametrize(
    ("how", "end"), soak_but([("exit", "Crashed"), ("wrong", "Failed")], ("wrong", "Failed"))
)
def test_what_another_run_does_not_help_stays(
    runs: Runs, tmp_path: Path, how: str, end: str
) -> None:
    """If a script fails twice in the same way, the hook does not restart it again.

    A retry by a user resets the count.
    """
    run = runs.start("breaks", notes=str(tmp_path / "notes"), ways=[how])
    assert named(runs.until_left(run)) == [end, AGAIN, end]
    retry: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
    runs.client.set_flow_run_state(run, retry, force=True)
    assert named(runs.until_left(run, times=2)) == [end, AGAIN, end] * 2


@pytest.fixture(scope="module")
def with_tasks(
    prefect_api: str, _serving: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Return the notes of a flow run's three tasks with retries, and its final states."""
    folder = tmp_path_factory.mktemp("tasks")
    with SyncPrefectClient(prefect_api) as client:
        runs = Runs(client)
        run = runs.start("with-tasks", folder=str(folder))
        until(lambda: named(runs.states(run)), "the run has ended")
        return folder, named(runs.states(run))


# The notes of a task, and the number of its tries.
TRIES = {
    "twice": 3,  # two restarts are two retries, even if the task would allow more
    "always": 3,  # the budget ends the retries
    "wrong": 2,  # the same error of the script also ends them
}


@pytest.mark.parametrize("task", TRIES)
def test_a_task_is_retried_as_the_policy_has_it(
    with_tasks: tuple[Path, list[str]], task: str
) -> None:
    """A task has the number of retries of its policy, all in one process."""
    folder, _ = with_tasks
    assert len(processes(folder / task)) == TRIES[task]
    assert len(set(processes(folder / task))) == 1


def test_a_task_that_breaks_each_time_fails_its_flow(with_tasks: tuple[Path, list[str]]) -> None:
    """The first task succeeds in its last try; the last task fails the flow."""
    assert with_tasks[1] == ["Failed"]
