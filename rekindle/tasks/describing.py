"""What a job is to be, written into its directory on this machine."""

from __future__ import annotations

import msgspec
from prefect.client.schemas.objects import FlowRun

from rekindle.blocks.job import TrainingJob
from rekindle.job.spec import JobDirectory, replace_file
from rekindle.tasks import job_access as jobs


def describe(job: TrainingJob, directory: JobDirectory, job_id: str) -> None:
    """Write down what the job is to be. Raises UsageError: no job can be made of it."""
    spec = job.to_spec(job_id)
    if job.kubernetes is None:
        directory.create(spec)
        directory.pods.unlink(missing_ok=True)
    else:
        # First: a job that is described without its pods is one of this machine.
        replace_file(directory.pods, msgspec.json.encode(job.kubernetes))
        directory.create(spec, logs=False)  # they are in the pods


def describe_elsewhere(flow_run: FlowRun, job_id: str) -> None:
    """Describe a job that a flow process on another machine has put into a cluster.

    What else is to be known of it is in the cluster. Raises ValueError, UsageError: no job can be
    made of the flow run's parameters.
    """
    parameters = flow_run.parameters.get("job") or {}
    if parameters.get("kubernetes") and not jobs.exists(job_id):
        directory = jobs.directory_of(job_id)
        directory.path.mkdir(parents=True, exist_ok=True)
        describe(TrainingJob.model_validate(parameters), directory, job_id)
