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
from uuid import uuid4

import pytest
from waiting import run_command

from rekindle import names
from rekindle.blocks.job import TrainingJob

ODD = ("REKINDLE_X", "A=B")  # names of variables
SAVE = """
import json
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentCreate
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.blocks.saved import KeyBlock, SavedCluster, SavedPolicy, SavedStore
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
of_aws = {
    "aws_access_key_id": "schluessel-3",
    "aws_secret_access_key": "geheim-3",
    "aws_session_token": "geheim-4",
    "region_name": "eu-1",
    "aws_client_parameters": {"endpoint_url": "http://127.0.0.1:9"},
}
of_minio = {"minio_root_user": "schluessel-5", "minio_root_password": "geheim-5"}
others = {"aws": of_aws, "minio": of_minio, "aws-empty": {"profile_name": "p"}}
ids = {}
with get_client(sync_client=True) as client:
    for name, data in others.items():
        kind = client.read_block_type_by_slug(f"{name.partition('-')[0]}-credentials")
        form = client.get_most_recent_block_schema_for_block_type(kind.id)
        new = BlockDocumentCreate(
            name=name, data=data, block_type_id=kind.id, block_schema_id=form.id
        )
        ids[name] = client.create_block_document(new).id
picked = {"$ref": {"block_document_id": str(ids["aws"])}}
there, here = CheckpointDirectory(path="s3://bucket/x"), CheckpointDirectory(path="kept")
SavedStore(checkpoint=there, credentials=KeyBlock(aws=picked)).save("of-aws")
SavedStore(checkpoint=here, credentials=KeyBlock(minio="minio")).save("of-minio")
SavedStore(checkpoint=there, credentials=KeyBlock(aws="aws-empty")).save("empty")
SavedStore(
    checkpoint=there, access_key_id="schluessel-1", credentials=KeyBlock(aws="aws")
).save("two")
SavedPolicy(annotations={"fault-tolerance/job-retry-num": "3"}).save("of-modelarts")
ids = [SavedPolicy.load("careful")._block_document_id, SavedStore.load("of-aws")._block_document_id]
print(json.dumps([str(each) for each in ids]))
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
    "of-aws": {"saved_store": "of-aws"},
    "of-minio": {"saved_store": "of-minio"},
    "empty": {"saved_store": "empty"},
    "two": {"saved_store": "two"},
    "of-modelarts": {"saved_policy": "of-modelarts"},
}
EXAMPLES = """
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore

for kind in (SavedCluster, SavedPolicy, SavedStore):
    code = kind.get_code_example().strip()
    exec(code.removeprefix("```python").removesuffix("```"))
"""
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
    for kind, name in (
        ("cluster", "big"), ("checkpoint-store", "disk"), ("checkpoint-store", "of-aws")
    ):
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
    policy, store = json.loads(python("-c", SAVE))
    jobs = JOBS | {
        "picked": {"saved_policy": {"$ref": {"block_document_id": policy}}},
        "of another type": {"saved_policy": {"$ref": {"block_document_id": store}}},
        "picked and gone": {"saved_policy": {"$ref": {"block_document_id": str(uuid4())}}},
    }
    found, documents = json.loads(python("-c", DESCRIBE, json.dumps(jobs)))
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


def test_a_block_that_was_picked_in_the_form(described: Described) -> None:
    """The form gives the id of the picked block; one that is gone, or another type, is an error."""
    found = described[0]
    assert found["picked"] == found["policy"]
    assert "there is no block with the id" in found["picked and gone"]["error"]
    assert "of type Rekindle Policy" in found["of another type"]["error"]


@pytest.mark.parametrize(
    ("store", "place", "key"),
    [
        (
            "of-aws",
            "s3://bucket/x/job?endpoint=http://127.0.0.1:9&region=eu-1",
            ["schluessel-3", "geheim-3", "geheim-4"],
        ),
        ("of-minio", "kept/job", ["schluessel-5", "geheim-5"]),
    ],
)
def test_a_key_in_a_block_of_prefect_aws(
    described: Described, store: str, place: str, key: list[str]
) -> None:
    """The key, and for a location without them the endpoint and region, come from that block."""
    spec = described[0][store]
    assert spec["checkpoint_store"].endswith(place)
    assert list(spec["environment"].values()) == key


def test_a_block_of_prefect_aws_without_a_key(described: Described) -> None:
    """The error names the block; two keys in one block are an error, too."""
    assert "block 'aws-empty' of type aws-credentials has no access key" in str(
        described[0]["empty"]
    )
    assert "names another block with a key; remove one" in described[0]["two"]["error"]


def test_a_saved_policy_of_annotations(described: Described) -> None:
    """The annotations in a block are converted as those of a file."""
    policy = described[0]["of-modelarts"]["policy"]
    assert (policy["max_reschedules"], policy["dialect"]) == (3, "modelarts")


def test_the_examples_of_the_blocks(python: Python) -> None:
    """The example that Prefect shows of each block type runs as written."""
    python("-c", EXAMPLES)


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
