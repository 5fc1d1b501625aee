"""The example of a flow that is not Rekindle's, under a process worker: its process is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect_side import process, until
from repository import ROOT
from waiting import run_command

pytestmark = pytest.mark.timeout(400)

EXAMPLE = ROOT / "examples" / "own_flow" / "nightly.py"


@pytest.fixture
def client(prefect_api: str, tmp_path: Path) -> Iterator[SyncPrefectClient]:
    """Deploy the example as its text says, and start a process worker."""
    env = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(tmp_path)}
    env |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "REKINDLE_HOME": str(tmp_path / "home")}
    with SyncPrefectClient(prefect_api) as found:
        if "local" not in {pool.name for pool in found.read_work_pools()}:
            found.create_work_pool(WorkPoolCreate(name="local", type="process"))
        done = run_command([sys.executable, str(EXAMPLE)], env={**os.environ, **env}, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local"]
        with process(command, tmp_path / "worker.log", **env):
            yield found


def test_a_killed_run_of_an_own_flow_is_run_again_once(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    """The run has one state for its recovery, with the reason. Its task is retried."""
    deployment = client.read_deployment_by_name("nightly/own").id
    parameters = {"folder": str(tmp_path), "seconds": 1_000}
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
    started = tmp_path / "started"
    until(lambda: started.exists() and started.read_text(), "the flow has begun")
    os.kill(int(started.read_text()), signal.SIGKILL)

    def states() -> list[State[object]]:
        return sorted(client.read_flow_run_states(run), key=lambda one: one.timestamp)

    until(lambda: states()[-1].name == "Completed", "the run has completed")
    names = [state.name for state in states() if state.name not in ("Submitting", "Pending")]
    assert names == ["Scheduled", "Running", "Crashed", "Rescheduling", "Running", "Completed"]
    again = next(state for state in states() if state.name == "Rescheduling")
    assert "Rekindle restarts this run: Process exited with status code: -9" in str(again.message)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
