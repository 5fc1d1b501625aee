"""A platform engineer's day: set-up, blocks, a form, and all buttons, with a process worker.

The automations of `rekindle setup` are on. Each act is a thing that a person does, or a loss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import acts
import pytest
from flow_jobs import SCRIPTS
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.flow_runs import suspend_flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_side import ending_jobs, free_port, process, server, until
from served_runs import ServedRuns
from waiting import run_command

from rekindle.engines.client import JobClient
from rekindle.recovery.journal.journal import (
    Answered,
    Ended,
    FinalCheckpoint,
    FirstStep,
    Formed,
    JobStarted,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

# Names of the jobs.
MORNING, BROKEN, ASKED, UNWATCHED = "morning", "broken", "asked", "unwatched"


class Day(ServedRuns):
    """A machine with a Prefect server, the objects of `rekindle setup`, and a process worker."""

    def __init__(self, client: SyncPrefectClient, home: Path, api: str) -> None:
        super().__init__(client, home, "local")
        self._env = {"PREFECT_API_URL": api, "PREFECT_HOME": str(home), "REKINDLE_HOME": str(home)}
        self._env["PREFECT_WORKER_QUERY_SECONDS"] = "1"
        self.workers = contextlib.ExitStack()
        self.worker = 0

    def setup(self) -> None:
        """Run the documented command."""
        command = [sys.executable, "-m", "rekindle.cli.main", "setup", "--heartbeat", "30"]
        done = run_command(command, cwd=self.home, env={**os.environ, **self._env})
        assert done.returncode == 0, done.stderr

    def start_worker(self) -> int:
        """Start a worker of the pool; return its process id."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local"]
        log = self.home / "worker.log"
        return self.workers.enter_context(process(command, log, **self._env)).pid

    def save(self, slug: str, name: str, **data: Any) -> None:
        """Save a block."""
        kind = self.client.read_block_type_by_slug(slug)
        schema = self.client.get_most_recent_block_schema_for_block_type(kind.id)
        assert schema is not None
        block = BlockDocumentCreate(
            name=name, data=data, block_schema_id=schema.id, block_type_id=kind.id
        )
        self.client.create_block_document(block)

    def fill_in(self, flow: str, /, **parameters: Any) -> UUID:
        """Send what the form of a deployment sends."""
        filled = {name: {"__prefect_kind": "none", "value": x} for name, x in parameters.items()}
        state = {"type": "SCHEDULED", "message": "Run from the Prefect UI"}
        body = {"state": state, "parameters": filled, "job_variables": {}, "tags": []}
        path = f"/deployments/{self.deployment(flow)}/create_flow_run"
        return UUID(self._post(path, body)["id"])

    def resume(self, run: UUID, **answer: str) -> None:
        """Press Resume. answer: what the form of an approval sends."""
        self._post(f"/flow_runs/{run}/resume", {"run_input": answer} if answer else {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self.client.request("POST", path, json=body).json()

    def kill_rank(self, name: str) -> None:
        """Kill the last rank of a job."""
        endpoint = self.directory(name).endpoint()
        assert endpoint is not None
        status = JobClient(endpoint, self.directory(name).secret()).status()
        os.kill(status.ranks[-1].pid, signal.SIGKILL)

    def until_formed(self, name: str, generations: int) -> None:
        """Wait until the ranks have finished the first step of this generation."""
        self.until_training(name, generations, FirstStep)

    def crash(self, run: UUID) -> None:
        """Kill the process of a flow run, and wait until Prefect knows."""
        crashes = self.states(run).count("Crashed")
        for each in self.flow_processes(run):
            each.kill()
        until(lambda: self.states(run).count("Crashed") > crashes, "Prefect knows of the crash")

    def finish(self, name: str) -> None:
        """Let a job come to its end."""
        (self.home / name).touch()

    def ends(self, name: str) -> list[str]:
        """Return how each attempt of a job has ended."""
        return [event.outcome for event in self.history(name) if isinstance(event, Ended)]


class Morning:
    """The flow run of the first job, and the values in its form."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self.run = day.fill_in("train", job=steps(day, MORNING))
        day.until_formed(MORNING, 1)


def steps(day: Day, name: str) -> dict[str, Any]:
    """Return the description of a job that has a Session and two nodes."""
    job = day.job(name, script=str(SCRIPTS / "steps.py"), snapshot_every=2)
    job["arguments"] = [str(day.home / name), "1200"]
    return {**job, "saved_cluster": "pair", "saved_store": "often"}


def a_form_starts_a_job_with_the_values_of_blocks(morning: Morning) -> None:
    """The job has two nodes and a checkpoint every 50 steps."""
    spec = morning.day.directory(MORNING).spec()
    assert (spec.nodes, spec.checkpoint_every) == (2, 50)
    assert morning.day.state(morning.run).name == "Running"


def a_lost_rank_does_not_end_the_job(morning: Morning) -> None:
    """The other rank keeps its process, and the run shows the recovery."""
    morning.day.kill_rank(MORNING)
    morning.day.until_formed(MORNING, 2)
    morning.day.until_state(morning.run, "Running")
    assert "Recovering" in morning.day.states(morning.run)
    assert morning.day.newest(MORNING, Formed).step > 0


def suspend_frees_the_machine_and_resume_continues(morning: Morning) -> None:
    """The next attempt continues from the final checkpoint of the first one."""
    day = morning.day
    suspend_flow_run(flow_run_id=morning.run)
    assert day.until_ended(MORNING).outcome == "stopped"
    day.until_left(morning.run)
    assert day.state(morning.run).name == "Suspended"
    left = day.newest(MORNING, FinalCheckpoint)
    day.resume(morning.run)
    day.until_formed(MORNING, 3)
    assert day.newest(MORNING, Formed).step == left.step > 0


def a_person_is_faster_than_the_automation_after_a_crash(morning: Morning) -> None:
    """Retry on a crashed run adopts its job, although hooks and automation rerun it as well."""
    day = morning.day
    day.crash(morning.run)
    day.retry(morning.run)
    day.finish(MORNING)
    day.until_state(morning.run, "Completed")
    day.until_left(morning.run)
    assert day.state(morning.run).name == "Completed"
    assert day.count(MORNING, JobStarted) == 2
    assert day.ends(MORNING) == ["stopped", "succeeded"]


class Afternoon:
    """Two flow runs, whose jobs ask a person or fail."""

    def __init__(self, day: Day) -> None:
        self.day = day
        asked = day.job(ASKED, processes_per_node=2, saved_policy="careful")
        self.asked = day.fill_in("train", job=asked)
        once = day.job(BROKEN, script=str(SCRIPTS / "fails_once.py"), policy={"max_restarts": 0})
        self.broken = day.fill_in("train", job={**once, "snapshot_every": 2})


def retry_on_a_failed_run_continues(afternoon: Afternoon) -> None:
    """The run shows the error of the script; the next attempt begins with the last snapshot."""
    day = afternoon.day
    state = day.until_state(afternoon.broken, "Failed")
    assert "shard 7 is damaged" in (state.message or "")
    left = day.newest(BROKEN, FinalCheckpoint)
    day.until_left(afternoon.broken)
    day.retry(afternoon.broken)
    day.until_state(afternoon.broken, "Completed")
    assert day.newest(BROKEN, Formed).step == left.step > 0
    assert day.ends(BROKEN) == ["failed", "succeeded"]


def an_approved_restart_happens(afternoon: Afternoon) -> None:
    """The run waits as AwaitingApproval, and continues after the form."""
    day = afternoon.day
    day.until_training(ASKED)
    day.until_state(afternoon.asked, "Running")
    day.kill_rank(ASKED)
    day.until_state(afternoon.asked, "AwaitingApproval")
    day.resume(afternoon.asked, answer="approve", name="Ada")
    day.until_training(ASKED, 2)
    day.until_state(afternoon.asked, "Restarting")


def a_refused_restart_ends_the_job(afternoon: Afternoon) -> None:
    """The state names who refused."""
    day = afternoon.day
    day.kill_rank(ASKED)
    day.until_state(afternoon.asked, "AwaitingApproval")
    day.resume(afternoon.asked, answer="refuse", name="Grace")
    state = day.until_state(afternoon.asked, "Failed")
    assert "restart was not approved by Grace" in (state.message or "")
    given = [event for event in day.history(ASKED) if isinstance(event, Answered)]
    assert [(event.granted, event.by) for event in given] == [(True, "Ada"), (False, "Grace")]


class Evening:
    """A flow run whose worker dies."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self.unwatched = day.fill_in("train", job=day.job(UNWATCHED))


def a_killed_worker_does_not_end_the_job(evening: Evening) -> None:
    """The flow's process continues, or the next worker starts another one, which adopts the job."""
    day = evening.day
    day.until_training(UNWATCHED)
    day.until_state(evening.unwatched, "Running")
    os.kill(day.worker, signal.SIGKILL)
    day.worker = day.start_worker()
    day.finish(UNWATCHED)
    day.until_state(evening.unwatched, "Completed")
    assert day.count(UNWATCHED, JobStarted) == 1


MORNING_ACTS = [
    a_form_starts_a_job_with_the_values_of_blocks,
    a_lost_rank_does_not_end_the_job,
    suspend_frees_the_machine_and_resume_continues,
    a_person_is_faster_than_the_automation_after_a_crash,
]
AFTERNOON_ACTS = [
    retry_on_a_failed_run_continues,
    an_approved_restart_happens,
    a_refused_restart_ends_the_job,
]
EVENING_ACTS = [
    a_killed_worker_does_not_end_the_job,
]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """Set up a server, and start a worker."""
    home = tmp_path_factory.mktemp("day")
    with (
        server(tmp_path_factory.mktemp("prefect"), free_port()) as api,
        ending_jobs(home),
        temporary_settings({PREFECT_API_URL: api}),
        SyncPrefectClient(api) as client,
    ):
        found = Day(client, home, api)
        found.setup()
        found.save("rekindle-cluster", "pair", nodes=2, processes_per_node=1)
        found.save("rekindle-checkpoint-store", "often", checkpoint={"every": 50})
        found.save("rekindle-policy", "careful", policy={"approve": ["restart"]})
        with found.workers:
            found.worker = found.start_worker()
            yield found


@pytest.fixture(scope="module")
def morning(day: Day) -> acts.Played:
    """Play the acts of the morning."""
    return acts.Played(MORNING_ACTS, Morning(day))


@pytest.fixture(scope="module")
def afternoon(day: Day) -> acts.Played:
    """Play the acts of the afternoon."""
    return acts.Played(AFTERNOON_ACTS, Afternoon(day))


@pytest.fixture(scope="module")
def evening(day: Day) -> acts.Played:
    """Play the acts of the evening."""
    return acts.Played(EVENING_ACTS, Evening(day))


@pytest.mark.parametrize("act", acts.names(MORNING_ACTS))
def test_a_morning(morning: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    morning.check(act)


@pytest.mark.parametrize("act", acts.names(AFTERNOON_ACTS))
def test_an_afternoon(afternoon: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    afternoon.check(act)


@pytest.mark.parametrize("act", acts.names(EVENING_ACTS))
def test_an_evening(evening: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    evening.check(act)
