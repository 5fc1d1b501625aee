"""A real Prefect server and a served train flow, for tests; each a process of its own."""

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
# Prefect's server on SQLite has been seen to wait for its own lock for 60 s.
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
    """Look until what is seen is true; the server has other work than to answer."""
    return wait_until(look, what, at_rest_s, pause_s=_TICK_S)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block is left."""
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
    """Run a Prefect server; gives the address of its API."""
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
        """The state of the flow run now."""
        state = self.client.read_flow_run(self.id).state
        assert state is not None
        return state

    def until(self, look: Callable[[], T], what: str) -> T:
        """Look until what is seen is true; the error has the story of the flow run."""
        try:
            return until(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def until_final(self) -> State[Any]:
        """Wait for the flow run's end."""

        def ended() -> State[Any] | None:
            state = self.state()
            return state if state.is_final() else None

        return self.until(ended, "the flow run has ended")

    def until_state(self, name: str, count: int = 1) -> State[Any]:
        """Wait until the flow run has been in this state so often; it may end and be rerun."""
        self.until(lambda: self.states().count(name) >= count, f"{count} x {name}")
        return self.state()

    def story(self) -> str:
        """Return what is known of the flow run, for a wait that was in vain."""
        events = [journal.encode(event).decode() for event in self.history()]
        begun = [f"states: {self.states()}", "---- logs", self.logs(), "---- journal", *events]
        return "\n".join(begun)

    def retry(self) -> None:
        """Do what the Retry button of the UI does."""
        state: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
        self.client.set_flow_run_state(self.id, state, force=True)

    def until_rerun(self, pid: int) -> int:
        """Wait until another process than this one, which died, steers the job; return its id."""
        return self.until(
            lambda: (found := self.holder()) not in (0, pid) and found, "the rerun steers the job"
        )

    def until_left(self) -> None:
        """Wait until no process steers the job."""
        self.until(lambda: self.status().holder == "", "the lease is free")

    def cancel(self) -> None:
        """Do what the Cancel button of the UI does."""
        self.client.set_flow_run_state(self.id, Cancelling())

    def states(self) -> list[str]:
        """The names of all states that the flow run has had."""
        states = sorted(self.client.read_flow_run_states(self.id), key=lambda s: s.timestamp)
        return [state.name or "" for state in states]

    def task_states(self, name: str) -> list[str]:
        """The state names of all runs of a task in this flow run."""
        found = self.client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id]))
        )
        return [run.state_name or "" for run in found if run.name.startswith(name)]

    def artifact(self, what: str) -> Artifact:
        """The newest artifact of the job with this word at the end of its key."""
        key = f"{self.job_id}-{what}"
        found = self.client.read_artifacts(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id]))
        )
        return max((a for a in found if a.key == key), key=lambda a: str(a.created))

    def logs(self) -> str:
        """What the flow run and its tasks have logged."""
        found = self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self.id])))
        return "\n".join(each.message for each in found)

    def events(self) -> list[tuple[str, int]]:
        """Name and incident of the job's Prefect events, oldest first."""
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
        """Return the process that steers the job; wait for it."""
        return psutil.Process(self.until(self.holder, "a process steers the job"))

    def holder(self) -> int:
        """Return the id of the process that steers the job; 0: none does, or none is known."""
        try:
            match = re.search(r"process (\d+) on ", self.status().holder)
        except JobError:
            return 0  # no coordinator answers
        return int(match[1]) if match else 0

    def status(self) -> JobView:
        """What the coordinator says of the job."""
        endpoint = until(self.directory.endpoint, "the job has a coordinator")
        return JobClient(endpoint, self.directory.secret()).status()

    def history(self) -> list[AnyEvent]:
        """The job's journal."""
        journal_file = self.directory.journal_file
        return journal.read(journal_file.read_bytes().splitlines()) if journal_file.exists() else []

    def count(self, kind: type[Event]) -> int:
        """How many events of a kind the journal has."""
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
        """Let the runner see nothing, and start nothing, until the block is left."""
        runner = psutil.Process(self.pid)
        runner.suspend()
        try:
            yield
        finally:
            runner.resume()

    def flow_process(self) -> psutil.Process | None:
        """The process in which the runner runs its one flow run now, whatever it has come to."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if any("spawn_main" in word for word in child.cmdline()):
                    return child
        return None

    def start(self, **job: Any) -> FlowRun:
        """Schedule a flow run for now."""
        run = self.client.create_flow_run_from_deployment(self._deployment, parameters={"job": job})
        return FlowRun(self.client, self.home, run.id, job.get("name", "train"))


@contextlib.contextmanager
def serve(api: str, home: Path, name: str) -> Iterator[Served]:
    """Serve the train flow, with jobs in `home`, until the block is left."""
    env = {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "REKINDLE_HOME": str(home),
    }
    command = [sys.executable, "-c", _SERVE, name]
    with (
        SyncPrefectClient(api) as client,
        process(command, home / "serve.log", **env) as running,
    ):
        yield Served(client, home, running.pid, name)


@contextlib.contextmanager
def ending_jobs(home: Path) -> Iterator[None]:
    """End what jobs below `home` have left when the block is left: they outlive their flows."""
    try:
        yield
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(home / "jobs") in word for word in process.cmdline()):
                    process.kill()
