"""A user's flows that call the train flow: as subflow, in tasks, and as deployment.

The parent makes the calls that a file lists. So a rerun of it can make others, in another order.
"""

import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow, serve, task
from prefect.deployments import run_deployment
from prefect.flows import EntrypointType

from rekindle import TrainingJob, train


@task
def train_in_a_task(job: dict[str, Any]) -> str:
    """Train; return the job's id."""
    return train(TrainingJob(**job)).job_id


@flow
def parent(calls: str, deployment: str) -> list[str]:
    """Make the calls in the order of the file, those in tasks at once; return the ids of jobs."""
    ids, waiting = [], []
    for how, job in json.loads(Path(calls).read_text()):
        if how == "task":
            waiting.append(train_in_a_task.submit(job))
        elif how == "deployment":
            run_deployment(deployment, parameters={"job": job}, timeout=0)
        else:
            ids.append(train(TrainingJob(**job)).job_id)
    return ids + [each.result() for each in waiting]


@flow
def retrying(job: dict[str, Any]) -> str:
    """Train in a task that Prefect retries once."""
    return train_in_a_task.with_options(retries=1)(job)


if __name__ == "__main__":
    serve(
        parent.to_deployment(sys.argv[1]),
        retrying.to_deployment(sys.argv[1]),
        train.to_deployment(sys.argv[1], entrypoint_type=EntrypointType.MODULE_PATH),
        pause_on_shutdown=False,
        print_starting_message=False,
    )
