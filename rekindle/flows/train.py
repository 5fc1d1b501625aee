"""Define the train flow: a training run that continues after faults."""

# Annotations stay values in this module: Prefect validates parameters with them. It cannot resolve
# their names if it loads a flow by its entrypoint.

from prefect import flow, get_run_logger
from prefect.exceptions import Abort

from rekindle.blocks.job import TrainingJob
from rekindle.errors import JobFailedError, LeaseHeldError, RecordLostError, UsageError
from rekindle.recovery.journal.journal import RESCHEDULED, SUCCEEDED
from rekindle.reporting.run_state import WITHOUT_CHECKPOINT
from rekindle.tasks import job_access as jobs
from rekindle.tasks.acceptance import accepted, named, refused
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_job
from rekindle.tasks.hooks.rerun import recovery_hooks
from rekindle.tasks.identity import note_result
from rekindle.tasks.launch import How, launch, release
from rekindle.tasks.report import (
    JobResult,
    forget_keys,
    lost_result,
    record_result,
    report,
    report_later,
    unsaved,
)
from rekindle.tasks.run_watch import OverruledError, RunWatch, obeying, refuse_superseded
from rekindle.tasks.supervise import is_this_run, supervise


# The flow persists no result: the journal is the record, and Prefect would pickle. It validates its
# parameters itself, so that a mistake in them is one line, as all others.
@flow(
    name="train",
    persist_result=False,
    validate_parameters=False,
    on_cancellation=[stop_job],
    **recovery_hooks(OF_FLOW_PROCESS),
)
@obeying
def train(job: TrainingJob) -> JobResult:
    """Train on all ranks of the job, recover from faults, and report.

    The job outlives this process. Run the same flow run again, and it adopts the live job. A job
    that failed or was stopped resumes from its newest checkpoint. A job that has succeeded does
    not run again, also if its record is not on this machine: the result then comes from Prefect.
    A mistake in the job ends the run before that. Raises JobFailedError: the job has failed.
    """
    try:
        job, job_id = accepted(job)
    except UsageError as error:
        end: JobResult = refused(error)
        return end
    refuse_superseded(job, job_id)
    try:
        end = train_to_the_end(job, job_id)
    except RecordLostError as error:
        get_run_logger().warning("%s", error)
        return lost_result(job_id)
    if text := unsaved(job_id):
        end = named(WITHOUT_CHECKPOINT, text, end)
    return end


def train_to_the_end(job: TrainingJob, job_id: str) -> JobResult:
    """Do the work of the train flow in any flow run. Raises JobFailedError: the job has failed.

    Raises Abort if another process of the same flow run steers the job. That process then owns the
    run and its state. Raises LeaseHeldError if another flow run steers it: this run ends, and the
    message of its state names the other one. Raises RecordLostError if the job has succeeded and
    its record is not on this machine. Raises OverruledError if the state of the flow run ends the
    job.
    """
    try:
        with RunWatch(jobs.this_flow_run(job_id), get_run_logger()) as watch:
            _train(job, job_id, watch)
    except OverruledError:
        report_later(job_id, jobs.this_flow_run(job_id).id)
        if job.kubernetes is not None:
            jobs.release(job_id, get_run_logger())
        raise
    result = report(job_id)
    lacks = unsaved(job_id)
    if lacks and not job.filled_in().checkpoint.required:
        lacks = ""
    # First, because the next step removes all that a cluster knows.
    if result.outcome == SUCCEEDED and not lacks:
        record_result(job, result)
        note_result(job_id)
    if job.kubernetes is not None:
        release(job_id)
    forget_keys(job_id)
    result.raise_if_failed()
    if lacks:
        raise JobFailedError(f"{lacks}. Correct the store and retry this run, which then writes it")
    return result


def _train(job: TrainingJob, job_id: str, watch: RunWatch) -> None:
    """Launch or adopt the job, and follow it to its end."""
    while True:
        watch.check()
        launched = launch(job, job_id, watch.wait)
        if launched.how is How.FINISHED:
            return
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
            return
