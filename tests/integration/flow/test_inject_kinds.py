"""Each kind of `rekindle inject` through the flow on the local engine: its end, and the loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prefect_side import Served, until
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, reached, release, write_faults
from training_jobs.job import STEPS, Job
from training_jobs.processes import SCRIPT, environment
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.runtime.protocol import InjectionKind

pytestmark = pytest.mark.timeout(400)

RANKS = 4


class Row(NamedTuple):
    """What one kind leads to. strategy: "" where nothing is to be done."""

    fault: str
    strategy: str
    lost: bool = False  # whether steps may have to be done again


TABLE = {
    "kill": Row("process", "recover-in-place"),
    "node-lost": Row("node-lost", "recover"),
    "hang": Row("hang", "recover-in-place"),
    "hang-collective": Row("hang", "recover-in-place"),
    "hang-data": Row("hang", "recover-in-place"),
    "stop": Row("hang", "recover-in-place"),
    "livelock": Row("hang", "recover-in-place"),
    "slow": Row("", ""),
    "exception": Row("user-code", "restart", lost=True),
    "oom": Row("device-out-of-memory", "recover-in-place"),
    "uce": Row("device-memory", "retry"),
    "torn-update": Row("device-memory", "retry"),
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """The run that nothing interrupts."""
    with Job(tmp_path_factory.mktemp("baseline"), nodes=2) as job:
        assert job.end().outcome == "succeeded", job.story()
        yield job.record


def test_the_table_has_every_kind() -> None:
    """None is left out."""
    assert set(TABLE) == {kind.value for kind in InjectionKind}


# The job itself is tested with the others in tests/faults; to the flow a hang is a hang.
@pytest.mark.parametrize("kind", soak_but(TABLE, "node-lost", "hang", "exception", "uce"))
def test_a_kind_ends_as_its_row_says(
    kind: str, served: Served, baseline: Record, tmp_path: Path
) -> None:
    """The flow run completes, the incident table has the row, and the loss is what it was."""
    row = TABLE[kind]
    write_faults(tmp_path, [Fault(0, "forward", 3, do="pause")])
    run = served.start(
        script=str(SCRIPT),
        arguments=[str(tmp_path), "--variant", "ddp", "--steps", str(STEPS)],
        nodes=2,
        processes_per_node=RANKS // 2,
        environment=environment(uuid.uuid4().hex),
        snapshot_every=5,
        allow_injection=True,
        policy={"hang_timeout_s": 3.0, "max_restarts": 1},
    )
    until(reached(tmp_path, 0).exists, "the job waits in step 3")
    command = [sys.executable, "-m", "rekindle.cli", "inject", run.job_id]
    command += ["--rank", "2", "--kind", kind, "--step", "9"]
    environ = os.environ | {"REKINDLE_HOME": str(served.home)}
    subprocess.run(command, check=True, env=environ, timeout=60)
    release(tmp_path, 0)
    state = run.until_final()
    assert state.name == "Completed", state.message
    record = Record(tmp_path, STEPS, metrics=run.directory.path / "metrics", ranks=RANKS)
    assert_same_training(record, baseline)
    assert_samples_once(record)
    if not row.strategy:
        assert "incidents" not in str(run.events())
        return
    (told,) = json.loads(run.artifact("incidents").data)
    assert (told["fault"], told["strategy"]) == (row.fault, row.strategy)
    assert told["steps lost"] == 0 or row.lost
