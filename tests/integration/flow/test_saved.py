"""What is saved as a block, on a real Prefect server: a cluster, a store, a policy.

In processes of their own: a block's client leaves threads behind, which a later test that forks
would miss.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle import names
from rekindle.blocks.job import TrainingJob

SAVE = """
from rekindle.blocks.policy import RecoveryPolicy
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore
from rekindle.blocks.store import CheckpointDirectory

"""
TELL = """
import json, sys
import msgspec
from rekindle.blocks.job import TrainingJob
from rekindle.errors import UsageError

try:
    spec = TrainingJob(**json.loads(sys.argv[1])).to_spec("job")
    print(msgspec.json.encode(spec).decode())
except UsageError as error:
    print(json.dumps({"error": str(error)}))
"""
SEEN = """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    for kind, name in (("cluster", "big"), ("checkpoint-store", "disk")):
        named = {"block_type_slug": f"rekindle-{kind}", "name": name, "include_secrets": False}
        print(client.read_block_document_by_name(**named).data)
"""

Python = Callable[..., str]


@pytest.fixture
def python(prefect_api: str, tmp_path: Path) -> Python:
    """Run Python code beside the script; return what it prints."""
    (tmp_path / "train.py").touch()

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PREFECT_API_URL": prefect_api},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def tell(python: Python, **job: Any) -> dict[str, Any]:
    """What becomes of a job: its description for the runtime, or the error."""
    told: dict[str, Any] = json.loads(python("-c", TELL, json.dumps({"script": "train.py", **job})))
    return told


def test_a_job_takes_a_saved_policy(python: Python) -> None:
    """With the order of its strategies; the job's own policy is not used then."""
    policy = "RecoveryPolicy(strategies=['restart', 'retry'], max_restarts=7)"
    python("-c", f"{SAVE}SavedPolicy(policy={policy}).save('careful', overwrite=True)")
    found = tell(python, saved_policy="careful")["policy"]
    assert found["strategies"] == ["restart", "retry"]
    assert found["max_restarts"] == 7


def test_a_job_takes_a_saved_cluster_and_store(python: Python, tmp_path: Path) -> None:
    """Secrets reach the ranks, and nobody sees them in Prefect; the job's own variables win."""
    secrets = "environment={'TRACKER_KEY': 'geheim', 'MODE': 'all'}"
    save = f"SavedCluster(nodes=3, processes_per_node=2, spares=1, {secrets}).save('big')\n"
    keys = "access_key_id='schluessel-1', secret_access_key='geheim-2'"
    save += f"SavedStore(checkpoint=CheckpointDirectory(path='kept', every=9), {keys}).save('disk')"
    python("-c", SAVE + save)
    spec = tell(python, environment={"MODE": "one"}, saved_cluster="big", saved_store="disk")
    assert (spec["nodes"], spec["processes_per_node"], spec["spares"]) == (3, 2, 1)
    assert spec["environment"] == {
        "TRACKER_KEY": "geheim",
        "MODE": "one",
        names.ENV_STORE_ACCESS_KEY_ID: "schluessel-1",
        names.ENV_STORE_SECRET_ACCESS_KEY: "geheim-2",
    }
    assert spec["checkpoint_store"] == str(tmp_path / "kept" / "job")
    assert spec["checkpoint_every"] == 9
    seen = python("-c", SEEN)
    assert "'nodes': 3" in seen
    assert "geheim" not in seen
    assert "schluessel" not in seen


@pytest.mark.parametrize("name", ["REKINDLE_X", "A=B"])
def test_a_variable_that_cannot_be_set(python: Python, name: str) -> None:
    """Also not by a block; the error shows no value."""
    cluster = f"SavedCluster(environment={{{name!r}: 'geheim'}})"
    python("-c", f"{SAVE}{cluster}.save('odd', overwrite=True)")
    error = tell(python, saved_cluster="odd")["error"]
    assert name in error
    assert "geheim" not in error


def test_a_policy_that_was_not_saved(python: Python) -> None:
    """The error names it."""
    assert "'none'" in tell(python, saved_policy="none")["error"]


def test_the_blocks_are_registered_from_the_shell(python: Python) -> None:
    """As the documentation says."""
    said = python("-m", "prefect", "block", "register", "-m", "rekindle.blocks.saved")
    for name in ("Cluster", "Checkpoint Store", "Policy"):
        assert f"Rekindle {name}" in said


def test_a_file_of_own_entries(tmp_path: Path) -> None:
    """Found beside the script."""
    (tmp_path / "train.py").touch()
    job = TrainingJob(script="train.py", working_directory=str(tmp_path), fault_tables="own.toml")
    assert job.to_spec("job").fault_tables == str(tmp_path / "own.toml")
