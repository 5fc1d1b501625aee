"""A job belongs to its description: each rerun and each call finds its own job, or is refused."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import acts
import psutil
import pytest
from flow_jobs import SCRIPTS
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled
from prefect_side import ending_jobs, process, until

from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal.journal import (
    AnyEvent,
    FinalCheckpoint,
    Formed,
    JobStarted,
    RanksStarted,
)

pytestmark = pytest.mark.timeout(900)

NAME = "identity"


class Calls:
    """A parent with three kinds of calls, and runs that share a given id; all jobs wait."""

    def __init__(self, client: SyncPrefectClient, home: Path) -> None:
        self.client, self.home = client, home
        self.calls = home / "calls.json"
        self.plan(("task", "t"), ("deployment", "d"), ("subflow", "first"))
        parameters = {"calls": str(self.calls), "deployment": f"train/{NAME}"}
        once = {"script": str(SCRIPTS / "fails_once.py"), "arguments": [str(home / "once")]}
        once |= {"name": "once", "snapshot_every": 2, "policy": {"max_restarts": 0}}
        self.parent = self.start("parent", **parameters)
        self.retrying = self.start("retrying", job=once)
        self.until_training("t", "d", "first")
        self.child = self.holder("d")
        self.children = 0  # runs of the deployment before the rerun of the parent

    def job(self, gate: str, **fields: Any) -> dict[str, Any]:
        """Return a job that ends when a file exists."""
        script = str(SCRIPTS / "gated.py")
        return {"script": script, "arguments": [str(self.home / gate), "exit"], **fields}

    def plan(self, *calls: tuple[str, str]) -> None:
        """Write what the parent calls in its next run."""
        ids = {"second": "second-{flow_run.root_id}"}
        jobs = [[how, self.job(gate, job_id=ids.get(gate, ""))] for how, gate in calls]
        self.calls.write_text(json.dumps(jobs))

    def start(self, flow: str, **parameters: Any) -> UUID:
        deployment = until(lambda: self._find(f"{flow}/{NAME}"), "the flow is served")
        return self.client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def _find(self, name: str) -> UUID | None:
        try:
            return self.client.read_deployment_by_name(name).id
        except ObjectNotFound:
            return None

    def retry(self, run: UUID) -> None:
        """Do what the button does."""
        state: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
        self.client.set_flow_run_state(run, state, force=True)

    def state(self, run: UUID) -> State[Any]:
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state

    def until_final(self, run: UUID) -> State[Any]:
        until(lambda: self.state(run).is_final(), "the run has ended")
        return self.state(run)

    def jobs(self, gate: str) -> list[JobDirectory]:
        """Return all jobs of a gate."""
        every = [JobDirectory(each) for each in (self.home / "jobs").glob("*")]
        described = [each for each in every if (each.path / "job.json").exists()]
        return [each for each in described if str(self.home / gate) in each.spec().arguments]

    def history(self, gate: str) -> list[AnyEvent]:
        """Return the events of the only job of a gate."""
        (job,) = self.jobs(gate)
        return events_in(job.journal_file)

    def until_training(self, *gates: str) -> None:
        def all_train() -> bool:
            return all(
                self.jobs(gate) and any(isinstance(e, RanksStarted) for e in self.history(gate))
                for gate in gates
            )

        until(all_train, f"the jobs {gates} train")

    def holder(self, gate: str) -> str:
        """Return the flow run that steers the only job of a gate, with its process; wait for it."""
        (job,) = self.jobs(gate)

        def steers() -> str:
            endpoint = job.endpoint()
            if endpoint is None:
                return ""
            try:
                return JobClient(endpoint, job.secret()).status().holder
            except JobError:
                return ""

        return until(steers, "a process steers the job")

    def siblings(self) -> list[FlowRun]:
        """Return all runs of the deployment of the train flow, the oldest first."""
        deployment = self._find(f"train/{NAME}")
        assert deployment is not None
        this = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        runs = self.client.read_flow_runs(deployment_filter=this)
        return sorted(runs, key=lambda each: str(each.created))

    def named(self, name: str) -> FlowRun:
        (found,) = self.client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        )
        return found


def pid_of(holder: str) -> int:
    return int(holder.partition("process ")[2].split()[0])


def starts(history: Sequence[AnyEvent]) -> int:
    return sum(isinstance(event, JobStarted) for event in history)


def a_given_id_belongs_to_one_description(calls: Calls) -> None:
    """An equal run is refused while another one steers; a different one, with the field's name.

    Both end in a state that says so, and no hook runs them again. The job does not change.
    """
    (job,) = calls.jobs("d")
    equal = calls.start("train", job=calls.job("d", job_id=job.spec().job_id))
    other = calls.start("train", job=calls.job("d", job_id=job.spec().job_id, nodes=2))
    states = [calls.until_final(equal), calls.until_final(other)]
    assert [state.name for state in states] == ["Failed", "Failed"]
    assert "LeaseHeldError" in (states[0].message or "")
    assert calls.child.partition(",")[0] in (states[0].message or "")
    assert "exists with another description: nodes (1, now 2)" in (states[1].message or "")
    assert calls.holder("d") == calls.child


def a_parent_that_calls_in_another_order_finds_each_job(calls: Calls) -> None:
    """A rerun of a killed parent adopts equal jobs, and a new call has a job of its own."""
    first = calls.holder("first")
    again = ("subflow", "again")
    calls.plan(
        ("task", "t"),
        ("deployment", "d"),
        ("subflow", "second"),
        again,
        again,
        ("subflow", "first"),
    )
    (calls.home / "again").touch()
    calls.children = len(calls.siblings())
    psutil.Process(pid_of(first)).kill()
    until(lambda: calls.state(calls.parent).is_crashed(), "the parent has crashed")
    calls.retry(calls.parent)
    calls.until_training("second")
    assert calls.jobs("second")[0].spec().job_id == f"second-{calls.parent}"
    (calls.home / "second").touch()
    for gate in ("t", "first"):
        until(lambda gate=gate: pid_of(calls.holder(gate)) != pid_of(first), f"it steers {gate}")
        assert starts(calls.history(gate)) == 1


def a_second_child_is_refused_while_the_first_one_trains(calls: Calls) -> None:
    """The second run of the deployment fails, and its state names the first one."""
    until(lambda: len(calls.siblings()) > calls.children, "the rerun has started another child")
    state = calls.until_final(calls.siblings()[-1].id)
    assert state.name == "Failed"
    assert calls.child.partition(",")[0] in (state.message or "")
    assert calls.holder("d") == calls.child


def each_job_has_one_attempt_and_the_next_child_takes_the_result(calls: Calls) -> None:
    """All jobs end in their first attempt; another rerun of the parent trains nothing.

    Two equal calls in one run of the parent have two jobs, and its rerun takes both results.
    """
    for gate in ("t", "d", "first"):
        (calls.home / gate).touch()
    until(lambda: calls.state(calls.parent).is_completed(), "the parent has completed")
    name = calls.child.removeprefix("flow run ").partition(" (")[0]
    assert calls.until_final(calls.named(name).id).name == "Completed"
    calls.retry(calls.parent)
    until(lambda: len(calls.siblings()) > calls.children + 1, "a third child")
    assert calls.until_final(calls.siblings()[-1].id).name == "Completed"
    until(lambda: calls.state(calls.parent).is_completed(), "the parent has completed again")
    assert [starts(calls.history(gate)) for gate in ("t", "d", "first", "second")] == [1] * 4
    assert [starts(events_in(each.journal_file)) for each in calls.jobs("again")] == [1, 1]


def a_run_that_has_succeeded_does_not_train_again_without_its_record(calls: Calls) -> None:
    """Without the job directory, as on another machine, the result comes from Prefect."""
    (job,) = calls.jobs("d")
    job.path.rename(calls.home / "elsewhere")
    run = calls.siblings()[-1].id
    calls.retry(run)
    until(lambda: not calls.state(run).is_final(), "the run begins")
    assert calls.until_final(run).name == "Completed"
    assert not job.path.exists()


def a_retry_of_a_task_continues_from_the_final_checkpoint(calls: Calls) -> None:
    """The second attempt of the only job begins with the final checkpoint of the first one."""
    assert calls.until_final(calls.retrying).name == "Completed"
    history = calls.history("once")
    assert [e.attempt for e in history if isinstance(e, JobStarted)] == [1, 2]
    left = next(e for e in history if isinstance(e, FinalCheckpoint) and e.path)
    formed = [e for e in history if isinstance(e, Formed)]
    assert formed[-1].step == left.step > 0


ACTS = [
    a_given_id_belongs_to_one_description,
    a_parent_that_calls_in_another_order_finds_each_job,
    a_second_child_is_refused_while_the_first_one_trains,
    each_job_has_one_attempt_and_the_next_child_takes_the_result,
    a_run_that_has_succeeded_does_not_train_again_without_its_record,
    a_retry_of_a_task_continues_from_the_final_checkpoint,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Serve all flows by one runner, and begin all runs at once."""
    home = tmp_path_factory.mktemp("identity")
    env = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(home), "REKINDLE_HOME": str(home)}
    env["PREFECT_RUNNER_POLL_FREQUENCY"] = "1"
    command = [sys.executable, str(SCRIPTS / "parents.py"), NAME]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_jobs(home))
        client = stack.enter_context(SyncPrefectClient(prefect_api))
        stack.enter_context(process(command, home / "serve.log", **env))
        yield acts.Played(ACTS, Calls(client, home))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_identity(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
