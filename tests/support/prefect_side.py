"""A real Prefect server and a served train flow for tests, each in its own process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Scheduled
from waiting import bound_s, wait_until

from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.job.spec import JobDirectory
from rekindle.protocol.http_views import JobView
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import AnyEvent, Event
from rekindle.tasks.job_access import job_id_of

T = TypeVar("T")
# On SQLite, the Prefect server sometimes waits for its own lock for 60 s.
WAIT_S = 150.0
_TICK_S = 0.03

_SERVE = """
import sys
from prefect.flows import EntrypointType
from rekindle.flows.train import train
train.serve(
    name=sys.argv[1],
    entrypoint_type=EntrypointType.MODULE_PATH,
    print_starting_message=False,
    pause_on_shutdown=False,
)
"""


def until(look: Callable[[], T], what: str, at_rest_s: float = WAIT_S) -> T:
    """Wait until `look()` is true. The interval leaves the server time for other requests."""
    return wait_until(look, what, at_rest_s, pause_s=_TICK_S)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the context ends."""
    with log.open("ab") as output:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@contextlib.contextmanager
def server(home: Path, port: int) -> Iterator[str]:
    """Run a Prefect server and yield the address of its API."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    with process(command, home / "server.log", PREFECT_HOME=str(home)) as running:
        api = f"http://127.0.0.1:{port}/api"
        until(
            lambda: running.poll() is not None or _is_healthy(api),
            "the server answers",
            2 * WAIT_S,
        )
        assert running.poll() is None, (home / "server.log").read_text()
        yield api


def _is_healthy(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=bound_s(2.0)).is_success
    except httpx.TransportError:
        return False


class FlowRun:
    """One flow run of the served train flow, and its job."""

    def __init__(self, client: SyncPrefectClient, home: Path, id_: UUID, name: str) -> None:
        self.client = client
        self.id = id_
        self.job_id = job_id_of(id_, name)
        self.directory = JobDirectory(home / "jobs" / self.job_id)

    def state(self) -> State[Any]:
        """Return the current state of the flow run."""
        state = self.client.read_flow_run(self.id).state
        assert state is not None
        return state

    def until(self, look: Callable[[], T], what: str) -> T:
        """Wait until `look()` is true. The error has the history of the flow run."""
        try:
            return until(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def until_final(self) -> State[Any]:
        """Wait for the end of the flow run and return its state."""

        def ended() -> State[Any] | None:
            state = self.state()
            return state if state.is_final() else None

        return self.until(ended, "the flow run has ended")

    def until_state(self, name: str, count: int = 1) -> State[Any]:
        """Wait until the flow run has had this state `count` times. It can end and run again."""
        self.until(lambda: self.states().count(name) >= count, f"{count} x {name}")
        return self.state()

    def story(self) -> str:
        """Return states, logs and journal of the flow run, for the message of a wait that fails."""
        events = [journal.encode(event).decode() for event in self.history()]
        begun = [f"states: {self.states()}", "---- logs", self.logs(), "---- journal", *events]
        return "\n".join(begun)

    def retry(self) -> None:
        """Schedule the flow run again, as the Retry button of the UI does."""
        state: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
        self.client.set_flow_run_state(self.id, state, force=True)

    def until_rerun(self, pid: int) -> int:
        """Wait until another process than the failed `pid` controls the job, and return its id."""
        return self.until(
            lambda: (found := self.holder()) not in (0, pid) and found, "the rerun steers the job"
        )

    def until_left(self) -> None:
        """Wait until no process controls the job."""
        self.until(lambda: self.status().holder == "", "the lease is free")

    def cancel(self) -> None:
        """Cancel the flow run, as the Cancel button of the UI does."""
        self.client.set_flow_run_state(self.id, Cancelling())

    def states(self) -> list[str]:
        """Return the names of all states of the flow run, in order."""
        states = sorted(self.client.read_flow_run_states(self.id), key=lambda s: s.timestamp)
        return [state.name or "" for state in states]

    def task_states(self, name: str) -> list[str]:
        """Return the state names of all runs of a task in this flow run."""
        found = self.client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id]))
        )
        return [run.state_name or "" for run in found if run.name.startswith(name)]

    def artifact(self, what: str) -> Artifact:
        """Return the newest artifact of the job whose key ends with this word."""
        key = f"{self.job_id}-{what}"
        found = self.client.read_artifacts(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id]))
        )
        return max((a for a in found if a.key == key), key=lambda a: str(a.created))

    def logs(self) -> str:
        """Return the logs of the flow run and its tasks."""
        found = self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self.id])))
        return "\n".join(each.message for each in found)

    def events(self) -> list[tuple[str, int]]:
        """Return name and incident of the job's Prefect events, oldest first."""
        body = {
            "filter": {
                "event": {"prefix": ["rekindle."]},
                "any_resource": {"id": [f"rekindle.job.{self.job_id}"]},
                "order": "ASC",
            },
            "limit": 50,
        }
        found = httpx.post(f"{str(self.client.api_url).rstrip('/')}/events/filter", json=body)
        return [(e["event"], e["payload"]["incident"]) for e in found.json()["events"]]

    def process(self) -> psutil.Process:
        """Return the process that controls the job; wait until there is one."""
        return psutil.Process(self.until(self.holder, "a process steers the job"))

    def holder(self) -> int:
        """Return the id of the process that controls the job; 0: there is none or it is unknown."""
        try:
            match = re.search(r"process (\d+) on ", self.status().holder)
        except JobError:
            return 0  # no coordinator answers
        return int(match[1]) if match else 0

    def status(self) -> JobView:
        """Return the coordinator's view of the job."""
        endpoint = until(self.directory.endpoint, "the job has a coordinator")
        return JobClient(endpoint, self.directory.secret()).status()

    def history(self) -> list[AnyEvent]:
        """Return the events of the job's journal."""
        journal_file = self.directory.journal_file
        return journal.read(journal_file.read_bytes().splitlines()) if journal_file.exists() else []

    def count(self, kind: type[Event]) -> int:
        """Return the number of events of a kind in the journal."""
        return sum(isinstance(event, kind) for event in self.history())


class Served:
    """The train flow's deployment, served by a process (the runner)."""

    def __init__(self, client: SyncPrefectClient, home: Path, pid: int, name: str) -> None:
        self.client = client
        self.home = home
        self.pid = pid
        self._deployment = until(lambda: self._find(name), "the flow is served")

    def _find(self, name: str) -> UUID | None:
        try:
            return self.client.read_deployment_by_name(f"train/{name}").id
        except ObjectNotFound:
            return None

    @contextlib.contextmanager
    def unaware(self) -> Iterator[None]:
        """Suspend the runner, so that it starts nothing, until the context ends."""
        runner = psutil.Process(self.pid)
        runner.suspend()
        try:
            yield
        finally:
            runner.resume()

    def flow_process(self) -> psutil.Process | None:
        """Return the process of the runner's only flow run, in any state, or None."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if any("spawn_main" in word for word in child.cmdline()):
                    return child
        return None

    def start(self, **job: Any) -> FlowRun:
        """Schedule a flow run for now and return it."""
        run = self.client.create_flow_run_from_deployment(self._deployment, parameters={"job": job})
        return FlowRun(self.client, self.home, run.id, job.get("name", "train"))


@contextlib.contextmanager
def serve(api: str, home: Path, name: str, package: Path | None = None) -> Iterator[Served]:
    """Serve the train flow, with jobs in `home`, until the context ends.

    package: the folder of another package `rekindle`, also for the processes of the jobs.
    """
    env = {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "REKINDLE_HOME": str(home),
    }
    command = [sys.executable, "-c", _SERVE, name]
    if package is not None:
        env["PYTHONPATH"] = str(package)
        command = ["env", "--chdir", str(home), *command]
    with (
        SyncPrefectClient(api) as client,
        process(command, home / "serve.log", **env) as running,
    ):
        yield Served(client, home, running.pid, name)


@contextlib.contextmanager
def ending_jobs(home: Path) -> Iterator[None]:
    """Kill the remaining processes of jobs below `home` when the context ends.

    Jobs continue without their flow.
    """
    try:
        yield
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(home / "jobs") in word for word in process.cmdline()):
                    process.kill()
