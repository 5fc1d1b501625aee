"""The train flow: a training run that its faults do not end."""

# Annotations stay values in this module: Prefect validates parameters with them, and where it loads
# a flow by its entrypoint it cannot resolve their names.

from typing import Any
from uuid import UUID

from prefect import flow, runtime

from rekindle.blocks.job import TrainingJob
from rekindle.runtime.state import RESCHEDULED
from rekindle.tasks.hooks import stop_job
from rekindle.tasks.jobs import job_id_of
from rekindle.tasks.launch import How, launch
from rekindle.tasks.report import raise_if_failed, report
from rekindle.tasks.supervise import supervise


# Nothing is persisted: the ledger is the record, and Prefect would pickle.
@flow(name="train", persist_result=False, on_cancellation=[stop_job])
def train(job: TrainingJob) -> dict[str, Any]:
    """Train on all ranks of the job, recover from faults, and report.

    The job outlives this process: run the same flow run again, and it adopts the live job. A job
    that has succeeded is not run again; one that failed or was stopped resumes from its newest
    checkpoint.
    """
    job_id = job_id_of(UUID(runtime.flow_run.id), job.name)
    while True:
        launched = launch(job, job_id)
        if launched.how is How.FINISHED:
            break
        end = supervise(job_id, adopted=launched.how is How.ADOPTED)
        if end.outcome != RESCHEDULED:
            break
    result = report(job_id)
    raise_if_failed(result)
    return result
