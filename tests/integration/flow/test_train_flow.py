"""The train flow on a real Prefect server: a script that fails, and a server that is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from flow_jobs import SCRIPTS
from prefect.client.orchestration import SyncPrefectClient
from prefect_side import FlowRun, Served, ending_jobs, free_port, process, server, until

from rekindle.recovery.journal.journal import RanksStarted

pytestmark = pytest.mark.timeout(400)


def test_a_failing_script_fails_the_flow_run(served: Served, tmp_path: Path) -> None:
    """The flow run fails with the reason, and the report shows the first rank's traceback."""
    gate = tmp_path / "gate"
    gate.touch()
    run = served.start(
        script=str(SCRIPTS / "gated.py"),
        arguments=[str(gate), "raise"],
        nodes=2,
        policy={"max_restarts": 0},
    )
    state = run.until_final()
    assert state.name == "Failed"
    assert "JobFailedError" in (state.message or "")
    assert "raised ValueError: shard 7 is damaged" in (state.message or "")
    report = str(run.artifact("report").data)
    assert "Traceback (most recent call last)" in report
    assert 'raise ValueError("shard 7 is damaged")' in report


def flow_command(job: dict[str, Any]) -> list[str]:
    """Return the command that runs the train flow for a job, without a deployment."""
    call = (
        "import json, sys; from rekindle.flows.train import train; train(json.loads(sys.argv[1]))"
    )
    return [sys.executable, "-c", call, json.dumps(job)]


def test_a_server_that_is_down_does_not_disturb_the_job(tmp_path: Path) -> None:
    """A job recovers while Prefect's server is down; the flow reports it afterwards."""
    home, port, gate = tmp_path / "prefect", free_port(), tmp_path / "gate"
    home.mkdir()
    job = {"script": str(SCRIPTS / "gated.py"), "arguments": [str(gate), "exit"], "nodes": 2}
    env = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": str(home)}
    env["REKINDLE_HOME"] = str(tmp_path)
    with ending_jobs(tmp_path), contextlib.ExitStack() as stack:
        with server(home, port) as api:
            stack.enter_context(process(flow_command(job), tmp_path / "flow.log", **env))
            client = stack.enter_context(SyncPrefectClient(api))
            flow_run = until(client.read_flow_runs, "the flow run is known")[0]
            run = FlowRun(client, tmp_path, flow_run.id, "train")
            until(lambda: run.count(RanksStarted) == 2, "the ranks run")
            before = until(lambda: run.status().holder and run.status(), "the flow steers the job")
        os.kill(before.ranks[0].pid, signal.SIGKILL)
        until(lambda: run.count(RanksStarted) == 4, "all ranks are started anew")
        assert run.status().holder == before.holder
        with server(home, port):
            closed = ("rekindle.incident.closed", 1)
            until(lambda: closed in run.events(), "Prefect is told of the incident")
            gate.touch()
            assert run.until_final().name == "Completed"
            assert "signal 9 (SIGKILL)" in str(run.artifact("report").data)
