"""The check-nodes flow on a real Prefect server isolates faulty nodes and shows all nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from checked.trouble import Killer
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect_side import ending_jobs
from waiting import run_command

from rekindle.engines.hosts import HostLog
from rekindle.tasks.report import ARTIFACT

pytestmark = pytest.mark.timeout(300)

LENIENT = {"compute_factor": 20, "link_factor": 20}  # other processes use the cores during a test
_CALL = """
import json, sys
from rekindle.flows.check_nodes import check_nodes
print("FOUND", json.dumps(check_nodes(**json.loads(sys.argv[1]))))
"""


def check(api: str, home: Path, **parameters: Any) -> list[dict[str, Any]]:
    """Run the flow in a separate process, and return its result."""
    environment = os.environ | {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home),
        "REKINDLE_HOME": str(home),
    }
    command = [sys.executable, "-c", _CALL, json.dumps(parameters | {"node_check": LENIENT})]
    with ending_jobs(home):
        done = run_command(command, 200.0, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("FOUND "))
    return found


def table_of(api: str) -> list[dict[str, Any]]:
    """Return the rows of the flow's newest artifact."""
    with SyncPrefectClient(api) as client:
        by_key = ArtifactFilter(key=ArtifactFilterKey(any_=[ARTIFACT]))
        found = max(client.read_artifacts(artifact_filter=by_key), key=lambda each: each.created)
    rows: list[dict[str, Any]] = json.loads(str(found.data))
    return rows


def test_a_sick_node_is_isolated_and_shown(prefect_api: str, tmp_path: Path) -> None:
    with Killer("local-1", tmp_path):
        found = check(prefect_api, tmp_path, nodes=3)
    assert table_of(prefect_api) == found
    (sick,) = [row for row in found if row["verdict"] != "healthy"]
    assert found[0] is sick
    assert (sick["host"], sick["verdict"], sick["isolated"]) == ("local-1", "faulty", True)
    assert "SIGKILL" in sick["why"]
    healthy = [row for row in found if row["verdict"] == "healthy"]
    assert {row["host"] for row in healthy} >= {"local-0", "local-2"}
    assert all(row["compute (ms)"] > 0 for row in healthy)
    hosts = HostLog(tmp_path).hosts()
    assert hosts["local-1"].isolated
    assert not hosts["local-0"].isolated
    assert "healthy" in hosts["local-0"].checked()
    # The next check avoids the isolated node.
    again = check(prefect_api, tmp_path, nodes=3)
    assert "local-1" not in {row["host"] for row in again}
