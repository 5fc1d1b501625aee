"""The profile flow on a real Prefect server: a training run's ranks are switched, and shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect_side import Served, until
from training_jobs.injection import Fault, reached, release, write_faults
from training_jobs.job import STEPS
from training_jobs.processes import SCRIPT, environment

from rekindle.recovery.profiled import Profiled

pytestmark = pytest.mark.timeout(300)

_CALL = """
import json, sys
from uuid import UUID
from rekindle.flows.profile import profile
asked = json.loads(sys.argv[1])
print("FOUND", json.dumps(profile(UUID(asked.pop("run")), **asked)))
"""


def profile(
    api: str, served: Served, run: object, **asked: Any
) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(served.home),
        "REKINDLE_HOME": str(served.home),
    }
    command = [sys.executable, "-c", _CALL, json.dumps({"run": str(run), **asked})]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_training_run_is_switched_and_shown(
    prefect_api: str, served: Served, tmp_path: Path
) -> None:
    write_faults(tmp_path, [Fault(0, "forward", step, do="pause") for step in (3, 12)])
    run = served.start(
        script=str(SCRIPT),
        arguments=[str(tmp_path), "--variant", "ddp", "--steps", str(STEPS)],
        processes_per_node=4,
        environment=environment(uuid.uuid4().hex),
        policy={"hang_timeout_s": 200.0},
    )
    until(reached(tmp_path, 0).exists, "the job waits in step 3")
    on = profile(prefect_api, served, run.id, kinds=["communication"])
    assert "FOUND []" in on.stdout, on.stdout + on.stderr
    release(tmp_path, 0)
    until(reached(tmp_path, 1).exists, "the job waits in step 12")
    wrong = profile(prefect_api, served, run.id, on=False, kinds=["step"])
    assert wrong.returncode != 0
    assert "off only together with communication" in wrong.stderr
    assert profile(prefect_api, served, run.id, on=False).returncode == 0
    release(tmp_path, 1)
    assert run.until_final().name == "Completed"
    assert run.count(Profiled) == 2
    late = profile(prefect_api, served, run.id)
    assert late.returncode != 0
    assert "does not run" in late.stderr
    (task,) = (run.directory.path / "profiling").iterdir()
    assert len(list(task.iterdir())) == 4
