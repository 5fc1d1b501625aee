"""Recovery hooks on a user's own flow and task: run again within the budget, and never twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
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
from rekindle.recovery.policy import Policy
from rekindle.tasks.recovery_hooks import recovery_hooks

pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).with_name("scripts") / "user_flows.py"
NAME = "hooks"
AGAIN = "Rescheduling"


class Runs:
    """Flow runs of the user's flows."""

    def __init__(self, client: SyncPrefectClient, notes: Path) -> None:
        self.client = client
        self.notes = notes

    def start(self, flow: str, how: str, times: int) -> UUID:
        """Schedule a run that breaks so many times."""
        deployment = until(lambda: self._find(f"{flow}/{NAME}"), "the flow is served")
        parameters = {"notes": str(self.notes), "how": how, "times": times}
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
            return sum(text.startswith("It is not run again: ") for text in told) >= times

        until(said, f"the run is left as it ended, {times} times")
        return self.states(run)

    def processes(self) -> list[str]:
        """The process of each time that the user's function was entered."""
        return self.notes.read_text().split()


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
def runs(prefect_api: str, _serving: None, tmp_path: Path) -> Iterator[Runs]:
    """The user's flows, served."""
    with SyncPrefectClient(prefect_api) as client:
        yield Runs(client, tmp_path / "notes")


def named(states: list[State[object]]) -> list[str]:
    """The names of those states that say what became of a run."""
    return [state.name or "" for state in states if state.is_final() or state.name == AGAIN]


@pytest.mark.parametrize(
    ("how", "end"), [("kill", "Crashed"), ("raise", "Failed"), ("terminate", "Crashed")]
)
def test_a_run_that_breaks_is_run_again(runs: Runs, how: str, end: str) -> None:
    """After its end the run is scheduled once more, in a process of its own, with the reason."""
    run = runs.start("breaks", how, 1)
    states = runs.until_completed(run)
    assert named(states) == [end, AGAIN, "Completed"]
    assert len(set(runs.processes())) == len(runs.processes()) == 2
    said = next(state.message for state in states if state.name == AGAIN)
    assert said is not None
    assert said.startswith("It is run again: ")


@pytest.mark.parametrize(
    ("how", "end"), soak_but([("exit", "Crashed"), ("wrong", "Failed")], ("wrong", "Failed"))
)
def test_what_another_run_does_not_help_stays(runs: Runs, how: str, end: str) -> None:
    """The same doing of the script twice is enough; a retry by a person begins anew."""
    run = runs.start("breaks", how, 100)
    assert named(runs.until_left(run)) == [end, AGAIN, end]
    retry: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
    runs.client.set_flow_run_state(run, retry, force=True)
    assert named(runs.until_left(run, times=2)) == [end, AGAIN, end] * 2


def test_a_hook_that_comes_late_does_nothing(runs: Runs, prefect_api: str) -> None:
    """The hook of an end that somebody has acted upon already leaves the run alone."""
    run = runs.start("breaks", "raise", 1)
    states = runs.until_completed(run)
    [failed] = [state for state in states if state.name == "Failed"]
    [hook] = recovery_hooks(Policy(max_reschedules=9))["on_failure"]
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        hook(train, runs.client.read_flow_run(run), failed)
    assert [state.id for state in runs.states(run)] == [state.id for state in states]


def test_a_task_is_retried_where_the_policy_has_a_restart(runs: Runs) -> None:
    """Two restarts are two retries, in one process, however many the task would allow."""
    run = runs.start("with-task", "raise", 2)
    assert named(runs.until_completed(run)) == ["Completed"]
    assert len(runs.processes()) == 3
    assert len(set(runs.processes())) == 1


@pytest.mark.parametrize(("how", "tries"), [("raise", 3), ("wrong", 2)])
def test_a_task_that_goes_on_breaking_fails(runs: Runs, how: str, tries: int) -> None:
    """The budget ends the retries, and so does the same error of the script."""
    run = runs.start("with-task", how, 100)
    until(lambda: named(runs.states(run)), "the run has ended")
    assert named(runs.states(run)) == ["Failed"]
    assert len(runs.processes()) == tries
