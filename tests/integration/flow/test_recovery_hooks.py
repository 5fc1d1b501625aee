"""Recovery hooks on a user's own flow and task: run again within the budget, and never twice."""

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
        """All states of a run, in order."""
        return sorted(self.client.read_flow_run_states(run), key=lambda one: one.timestamp)

    def until_completed(self, run: UUID) -> list[State[object]]:
        """Wait until the run has completed."""
        until(lambda: "Completed" in named(self.states(run)), "the run has completed")
        return self.states(run)

    def until_left(self, run: UUID, times: int = 1) -> list[State[object]]:
        """Wait until the hook has said so often that it leaves the run as it ended."""
        about = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))

        def said() -> bool:
            told = [log.message for log in self.client.read_logs(about)]
            return (
                sum(text.startswith("Rekindle does not restart this run: ") for text in told)
                >= times
            )

        until(said, f"the run is left as it ended, {times} times")
        return self.states(run)


def processes(notes: Path) -> list[str]:
    """Return the process of each time that the user's function was entered."""
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
    """The user's flows, served."""
    with SyncPrefectClient(prefect_api) as client:
        yield Runs(client)


def named(states: list[State[object]]) -> list[str]:
    """Return the names of those states that tell what became of a run."""
    return [state.name or "" for state in states if state.is_final() or state.name == AGAIN]


# How a run breaks, and the state in which that ends it.
BREAKS = {"kill": "Crashed", "raise": "Failed", "terminate": "Crashed"}


def test_a_run_that_breaks_is_run_again(runs: Runs, prefect_api: str, tmp_path: Path) -> None:
    """Each end has the run scheduled again, in another process, with the reason.

    The hook of an end that was acted upon already leaves the run alone.
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
    [hook] = recovery_hooks(Policy(max_reschedules=9))["on_failure"]
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        hook(train, runs.client.read_flow_run(run), failed)
    assert [state.id for state in runs.states(run)] == [state.id for state in states]


@pytest.mark.parametrize(
    ("how", "end"), soak_but([("exit", "Crashed"), ("wrong", "Failed")], ("wrong", "Failed"))
)
def test_what_another_run_does_not_help_stays(
    runs: Runs, tmp_path: Path, how: str, end: str
) -> None:
    """The script fails twice in the same way: that is enough. A retry by a person counts from 0."""
    run = runs.start("breaks", notes=str(tmp_path / "notes"), ways=[how])
    assert named(runs.until_left(run)) == [end, AGAIN, end]
    retry: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
    runs.client.set_flow_run_state(run, retry, force=True)
    assert named(runs.until_left(run, times=2)) == [end, AGAIN, end] * 2


@pytest.fixture(scope="module")
def with_tasks(
    prefect_api: str, _serving: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A flow run of three tasks with retries: their notes, and the states that ended it."""
    folder = tmp_path_factory.mktemp("tasks")
    with SyncPrefectClient(prefect_api) as client:
        runs = Runs(client)
        run = runs.start("with-tasks", folder=str(folder))
        until(lambda: named(runs.states(run)), "the run has ended")
        return folder, named(runs.states(run))


# The notes of a task, and how often it is tried.
TRIES = {
    "twice": 3,  # two restarts are two retries, however many the task would allow
    "always": 3,  # the budget ends the retries
    "wrong": 2,  # so does the same error of the script
}


@pytest.mark.parametrize("task", TRIES)
def test_a_task_is_retried_as_the_policy_has_it(
    with_tasks: tuple[Path, list[str]], task: str
) -> None:
    """All tries of a task are in one process."""
    folder, _ = with_tasks
    assert len(processes(folder / task)) == TRIES[task]
    assert len(set(processes(folder / task))) == 1


def test_a_task_that_breaks_each_time_fails_its_flow(with_tasks: tuple[Path, list[str]]) -> None:
    """The task that breaks twice has succeeded in its last try; the last task fails the flow."""
    assert with_tasks[1] == ["Failed"]
