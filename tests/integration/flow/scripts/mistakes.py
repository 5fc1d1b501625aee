"""Save blocks, and run flows in this process. Print the end of each run as JSON.

The arguments are a folder, the endpoint of an S3 server, its key and secret, and the endpoint of a
server that fails first. The folder has the file runs.json: the runs by name, each with the name of
its flow and its parameters.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from prefect.types import SecretDict

from rekindle.blocks.job_fields import CheckpointDirectory
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore
from rekindle.flows.retrain import retrain
from rekindle.flows.train import train

FLOWS = {"train": train, "retrain": retrain}


def save(endpoint: str, key: str, secret: str, failing: str) -> None:
    bad = {"max_restarts": -1, "strategies": ["restart"]}
    SavedPolicy.model_construct(policy=bad).save("bad", overwrite=True)
    SavedCluster(nodes=2, min_nodes=3).save("contradiction", overwrite=True)
    SavedCluster(environment=SecretDict({"A=B": "secret"})).save("odd", overwrite=True)
    SavedStore(access_key_id="half", checkpoint=CheckpointDirectory(path="s3://a-bucket/x")).save(
        "half", overwrite=True
    )
    SavedStore(
        access_key_id=key, secret_access_key=secret, checkpoint=in_bucket("none", endpoint)
    ).save("gone", overwrite=True)
    SavedStore(
        access_key_id="no", secret_access_key="no", checkpoint=in_bucket("checkpoints", failing)
    ).save("late", overwrite=True)
    SavedStore(
        access_key_id="no", secret_access_key="no", checkpoint=in_bucket("checkpoints", endpoint)
    ).save("locked", overwrite=True)


def in_bucket(name: str, endpoint: str) -> CheckpointDirectory:
    place = f"s3://{name}/x?endpoint={endpoint}&addressing=path"
    return CheckpointDirectory(path=place, every=5)


def run(flow: str, parameters: dict[str, Any]) -> tuple[str, str, str, float]:
    began = time.monotonic()
    state = FLOWS[flow](**parameters, return_state=True)
    run_id = str(state.state_details.flow_run_id)
    return state.type.value, state.message, run_id, time.monotonic() - began


folder = Path(sys.argv[1])
save(*sys.argv[2:])
runs = json.loads((folder / "runs.json").read_text())
ends = {name: run(*of) for name, of in runs.items()}
(folder / "ends.json").write_text(json.dumps(ends))
