"""Flow runs of several served deployments, and their jobs, which have given ids."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from flow_jobs import SCRIPTS
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled
from prefect_side import ending_jobs, process, until

from rekindle.job.journal_reader import events_in
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal.journal import AnyEvent, Ended, RanksStarted


class ServedRuns:
    """Flow runs of the deployments of `scripts/callers.py`.

    A job of the name X has the id `X-job`, and ends when the file X exists. name: of the
    deployments.
    """

    def __init__(self, client: SyncPrefectClient, home: Path, name: str) -> None:
        self.client, self.home, self.name = client, home, name

    def job(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the description of a job."""
        given = {"name": name, "script": str(SCRIPTS / "gated.py"), "job_id": f"{name}-job"}
        return {**given, "arguments": [str(self.home / name), "exit"], **fields}

    def deployment(self, flow: str) -> UUID:
        """Return the deployment of a flow, with this name or FLOW/NAME; wait until it is served."""
        name = flow if "/" in flow else f"{flow}/{self.name}"
        return until(lambda: self._find(name), f"{name} is served")

    def _find(self, name: str) -> UUID | None:
        try:
            return self.client.read_deployment_by_name(name).id
        except ObjectNotFound:
            return None

    def start(self, flow: str, state: State[Any] | None = None, **parameters: Any) -> UUID:
        """Create a flow run. state: its first state; None: it is due now."""
        deployment = self.deployment(flow)
        return self.client.create_flow_run_from_deployment(
            deployment, parameters=parameters, state=state
        ).id

    def retry(self, run: UUID) -> None:
        """Do what the button does."""
        again: State[None] = Scheduled(name="AwaitingRetry", message="Retry from the UI")
        self.client.set_flow_run_state(run, again, force=True)

    def state(self, run: UUID) -> State[Any]:
        """Return the present state of a flow run."""
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state

    def states(self, run: UUID) -> list[str]:
        """Return the names of all states of a flow run, in order."""
        states = sorted(self.client.read_flow_run_states(run), key=lambda one: one.timestamp)
        return [state.name or "" for state in states]

    def until_state(self, run: UUID, name: str) -> State[Any]:
        """Wait until the flow run has this state, and return it."""
        until(lambda: self.state(run).name == name, f"the run is {name}")
        return self.state(run)

    def flow_processes(self, run: UUID) -> list[psutil.Process]:
        """Return the processes of a flow run."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if run.hex in each.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", ""):
                    found.append(each)
        return found

    def until_left(self, run: UUID) -> None:
        """Wait until no process of the flow run is left."""
        until(lambda: not self.flow_processes(run), "the process of the run has ended")

    def directory(self, name: str) -> JobDirectory:
        """Return the directory of a job."""
        return JobDirectory(self.home / "jobs" / f"{name}-job")

    def history(self, name: str) -> list[AnyEvent]:
        """Return the events of a job."""
        return events_in(self.directory(name).journal_file)

    def newest(self, name: str, kind: type[Any]) -> Any:
        """Return the newest event of a kind, or None."""
        found = [event for event in self.history(name) if isinstance(event, kind)]
        return found[-1] if found else None

    def count(self, name: str, kind: type[Any]) -> int:
        """Return the number of events of a kind."""
        return sum(isinstance(event, kind) for event in self.history(name))

    def until_training(self, name: str, attempts: int = 1, kind: type[Any] = RanksStarted) -> None:
        """Wait until the ranks of this attempt train."""
        until(lambda: self.count(name, kind) >= attempts, f"attempt {attempts} of {name} trains")

    def until_ended(self, name: str, attempts: int = 1) -> Ended:
        """Wait until this attempt has ended, and its processes too."""
        until(lambda: self.count(name, Ended) >= attempts, f"attempt {attempts} of {name} ended")
        until(lambda: not self.processes(name), f"no process of {name} is left")
        ended: Ended = self.newest(name, Ended)
        return ended

    def processes(self, name: str) -> list[psutil.Process]:
        """Return coordinator, agents and ranks of a job."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.directory(name).path) in each.cmdline():
                    found += [each, *each.children(recursive=True)]
        return found


@contextlib.contextmanager
def serving_runs(api: str, home: Path, name: str) -> Iterator[ServedRuns]:
    """Serve the flows of `scripts/callers.py` until the context ends."""
    env = {"PREFECT_API_URL": api, "PREFECT_HOME": str(home), "REKINDLE_HOME": str(home)}
    env["PREFECT_RUNNER_POLL_FREQUENCY"] = "1"
    command = [sys.executable, str(SCRIPTS / "callers.py"), name]
    with (
        ending_jobs(home),
        temporary_settings({PREFECT_API_URL: api}),
        SyncPrefectClient(api) as client,
        process(command, home / "serve.log", **env),
    ):
        yield ServedRuns(client, home, name)
