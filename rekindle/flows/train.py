"""Define the train flow: a training run that continues after faults."""

# Annotations stay values in this module: Prefect validates parameters with them. It cannot resolve
# their names if it loads a flow by its entrypoint.

from prefect import flow, get_run_logger
from prefect.exceptions import Abort

from rekindle.blocks.job import TrainingJob
from rekindle.errors import LeaseHeldError, RecordLostError
from rekindle.recovery.journal.journal import RESCHEDULED, SUCCEEDED
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_job
from rekindle.tasks.hooks.rerun import recovery_hooks
from rekindle.tasks.identity import job_of_this_run, note_result
from rekindle.tasks.launch import How, launch, release
from rekindle.tasks.report import JobResult, lost_result, record_result, report
from rekindle.tasks.supervise import is_this_run, supervise


# The flow persists no result: the journal is the record, and Prefect would pickle.
@flow(
    name="train",
    persist_result=False,
    on_cancellation=[stop_job],
    **recovery_hooks(OF_FLOW_PROCESS),
)
def train(job: TrainingJob) -> JobResult:
    """Train on all ranks of the job, recover from faults, and report.

    The job outlives this process. Run the same flow run again, and it adopts the live job. A job
    that failed or was stopped resumes from its newest checkpoint. A job that has succeeded does
    not run again, also if its record is not on this machine: the result then comes from Prefect.
    Raises JobFailedError: the job has failed.
    """
    job_id = job_of_this_run(job)
    try:
        return train_to_the_end(job, job_id)
    except RecordLostError as error:
        get_run_logger().warning("%s", error)
        return lost_result(job_id)


def train_to_the_end(job: TrainingJob, job_id: str) -> JobResult:
    """Do the work of the train flow in any flow run. Raises JobFailedError: the job has failed.

    Raises Abort if another process of the same flow run steers the job. That process then owns the
    run and its state. Raises LeaseHeldError if another flow run steers it: this run ends, and the
    message of its state names the other one. Raises RecordLostError if the job has succeeded and
    its record is not on this machine.
    """
    while True:
        launched = launch(job, job_id)
        if launched.how is How.FINISHED:
            break
        try:
            end = supervise(job_id, adopted=launched.how is How.ADOPTED)
        except LeaseHeldError as error:
            if not is_this_run(error):
                raise LeaseHeldError(
                    f"{error}. This run of job {job_id} has changed nothing; retry it after that"
                ) from error
            get_run_logger().error("%s. This process does not change the flow run", error)
            raise Abort(str(error)) from error
        if end.outcome != RESCHEDULED:
            break
    result = report(job_id)
    if result.outcome == SUCCEEDED:  # first, because the next step removes all that a cluster knows
        record_result(job, result)
        note_result(job_id)
    if job.kubernetes is not None:
        release(job_id)
    result.raise_if_failed()
    return result
