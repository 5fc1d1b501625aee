"""Saved blocks on a real Prefect server: a cluster, a store, a policy.

The tests use separate processes. A block's client leaves threads behind, and a later test that
forks would not have them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import run_command

from rekindle import names
from rekindle.blocks.job import TrainingJob

ODD = ("REKINDLE_X", "A=B")  # names of variables
SAVE = """
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore
from rekindle.blocks.job_fields import CheckpointDirectory

SavedPolicy(
    policy=Policy(strategies=(Strategy.RESTART, Strategy.RETRY), max_restarts=7)
).save("careful", overwrite=True)
secrets = {"TRACKER_KEY": "geheim", "MODE": "all"}
SavedCluster(nodes=3, processes_per_node=2, spares=1, environment=secrets).save("big")
SavedStore(
    checkpoint=CheckpointDirectory(path="kept", every=9),
    access_key_id="schluessel-1",
    secret_access_key="geheim-2",
).save("disk")
for number, name in enumerate(("REKINDLE_X", "A=B")):
    SavedCluster(environment={name: "geheim"}).save(f"odd-{number}", overwrite=True)
"""
# The described jobs, by the name of the test that uses them.
JOBS = {
    "policy": {"saved_policy": "careful"},
    "cluster": {
        "environment": {"MODE": "one"},
        "saved_cluster": "big",
        "saved_store": "disk",
    },
    "REKINDLE_X": {"saved_cluster": "odd-0"},
    "A=B": {"saved_cluster": "odd-1"},
    "unsaved": {"saved_policy": "none"},
}
DESCRIBE = """
import json, sys
import msgspec
from prefect.client.orchestration import get_client
from rekindle.blocks.job import TrainingJob
from rekindle.errors import UsageError

def described(job):
    try:
        spec = TrainingJob(script="train.py", **job).to_spec("job")
        return json.loads(msgspec.json.encode(spec))
    except UsageError as error:
        return {"error": str(error)}

found = {name: described(job) for name, job in json.loads(sys.argv[1]).items()}
documents = ""
with get_client(sync_client=True) as client:
    for kind, name in (("cluster", "big"), ("checkpoint-store", "disk")):
        named = {"block_type_slug": f"rekindle-{kind}", "name": name, "include_secrets": False}
        documents += str(client.read_block_document_by_name(**named).data)
print(json.dumps([found, documents]))
"""

Python = Callable[..., str]
Described = tuple[dict[str, dict[str, Any]], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory, with a script."""
    found = tmp_path_factory.mktemp("saved")
    (found / "train.py").touch()
    return found


@pytest.fixture(scope="module")
def python(prefect_api: str, folder: Path) -> Python:
    """Return a function that runs Python code in the script's folder and returns its output."""

    def run(*arguments: str) -> str:
        done = run_command(
            [sys.executable, *arguments],
            env={**os.environ, "PREFECT_API_URL": prefect_api},
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def described(python: Python) -> Described:
    """Return each job's description or error, and Prefect's view of the blocks.

    One process saves all blocks, and another one loads them.
    """
    python("-c", SAVE)
    found, documents = json.loads(python("-c", DESCRIBE, json.dumps(JOBS)))
    return found, documents


def test_a_job_takes_a_saved_policy(described: Described) -> None:
    """A saved policy, with the order of its strategies, replaces the job's own policy."""
    policy = described[0]["policy"]["policy"]
    assert policy["strategies"] == ["restart", "retry"]
    assert policy["max_restarts"] == 7


def test_a_job_takes_a_saved_cluster_and_store(described: Described, folder: Path) -> None:
    """Secrets of saved blocks reach the ranks, and Prefect shows none of them.

    The job's own variables have priority.
    """
    found, documents = described
    spec = found["cluster"]
    assert (spec["nodes"], spec["processes_per_node"], spec["spares"]) == (3, 2, 1)
    assert spec["environment"] == {
        "TRACKER_KEY": "geheim",
        "MODE": "one",
        names.ENV_STORE_ACCESS_KEY_ID: "schluessel-1",
        names.ENV_STORE_SECRET_ACCESS_KEY: "geheim-2",
    }
    assert spec["checkpoint_store"] == str(folder / "kept" / "job")
    assert spec["checkpoint_every"] == 9
    assert "'nodes': 3" in documents
    assert "geheim" not in documents
    assert "schluessel" not in documents


@pytest.mark.parametrize("name", ODD)
def test_a_variable_that_cannot_be_set(described: Described, name: str) -> None:
    """A block cannot set an invalid variable either; the error shows no value."""
    error = described[0][name]["error"]
    assert name in error
    assert "geheim" not in error


def test_a_policy_that_was_not_saved(described: Described) -> None:
    """The error names the missing policy."""
    assert "'none'" in described[0]["unsaved"]["error"]


def test_the_blocks_are_registered_from_the_shell(python: Python) -> None:
    """The documented command registers the blocks."""
    output = python("-m", "prefect", "block", "register", "-m", "rekindle.blocks.saved")
    for name in ("Cluster", "Checkpoint Store", "Policy"):
        assert f"Rekindle {name}" in output


def test_a_file_of_own_entries(tmp_path: Path) -> None:
    """A job finds its own fault table in the script's folder."""
    (tmp_path / "train.py").touch()
    job = TrainingJob(script="train.py", working_directory=str(tmp_path), fault_tables="own.toml")
    assert job.to_spec("job").fault_tables == str(tmp_path / "own.toml")
