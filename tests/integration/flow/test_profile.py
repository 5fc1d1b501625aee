"""The profile flow on a real Prefect server: it switches the profiler of a training run's ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect_side import Served, until
from training_jobs.injection import Fault, reached, release, write_faults
from training_jobs.processes import SCRIPT, environment

from rekindle.recovery.faults.stragglers import Profiled

pytestmark = pytest.mark.timeout(300)

# Runs the flow for each line of its input, and prints its result or its error.
_CALLS = """
import json, sys
from uuid import UUID
from rekindle.flows.profile import profile
for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = profile(UUID(asked.pop("run")), **asked)
    except Exception as error:
        answer = f"error: {error}"
    print("FOUND", json.dumps(answer), flush=True)
"""


class Profiler:
    """A process that runs the profile flow for each request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, run: object, **asked: Any) -> Any:
        """Run the flow for a flow run; return its result, or `error: ` and its error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run": str(run), **asked}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("FOUND "):
                return json.loads(line.removeprefix("FOUND "))
        raise AssertionError("the process has ended")


@pytest.fixture
def profiler(prefect_api: str, served: Served) -> Iterator[Profiler]:
    """Start the profile flow for the jobs of the served train flow."""
    environ = os.environ | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(served.home),
        "REKINDLE_HOME": str(served.home),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [sys.executable, "-c", _CALLS], env=environ, text=True, **pipes
    ) as process:
        yield Profiler(process)


def test_a_training_run_is_switched_and_shown(
    profiler: Profiler, served: Served, tmp_path: Path
) -> None:
    """Each rank writes its profile; an invalid order and an order after the end are errors."""
    write_faults(tmp_path, [Fault(0, "forward", step, do="pause") for step in (3, 6)])
    run = served.start(
        script=str(SCRIPT),
        arguments=[str(tmp_path), "--variant", "ddp", "--steps", "8"],
        processes_per_node=2,
        environment=environment(uuid.uuid4().hex),
        policy={"hang_timeout_s": 900.0},
    )
    until(reached(tmp_path, 0).exists, "the job waits in step 3")
    assert profiler.ask(run.id, kinds=["communication"]) == []
    release(tmp_path, 0)
    until(reached(tmp_path, 1).exists, "the job waits in step 6")
    wrong = profiler.ask(run.id, on=False, kinds=["step"])
    assert "off only together with communication" in wrong
    profiler.ask(run.id, on=False)
    assert run.count(Profiled) == 2
    release(tmp_path, 1)
    run.until_state("Completed")
    assert run.count(Profiled) == 2
    assert "does not run" in profiler.ask(run.id)
    (task,) = (run.directory.path / "profiling").iterdir()
    assert len(list(task.iterdir())) == 2
