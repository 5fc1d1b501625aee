"""First and last step of the train flow: start or adopt the job, and remove what it leaves."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

import msgspec
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.errors import JobError
from rekindle.job.file_lock import locked
from rekindle.job.spec import JobDirectory, replace_file
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED, SUCCEEDED
from rekindle.tasks import job_access as jobs


@task(name="release", cache_policy=NO_CACHE)
def release(job_id: str) -> bool:
    """Remove what is left of an ended job; say whether all is gone.

    What stays is no reason for the flow run to fail: the next one of this job removes it.
    """
    return jobs.release(job_id, get_run_logger())


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


# A coordinator that has ended its job exits a moment later.
_EXIT_TIMEOUT_S = 60.0


class How(str, enum.Enum):
    """What launching came to."""

    LAUNCHED = "launched"  # a new attempt was started
    ADOPTED = "adopted"  # the job lives; nothing was started
    FINISHED = "finished"  # the job has succeeded before; there is nothing to run


@dataclass(frozen=True, slots=True)
class Launched:
    """The job of this flow run, and how it came to be there."""

    job_id: str
    how: How
    attempt: int


@task(name="launch", cache_policy=NO_CACHE)
def launch(job: TrainingJob, job_id: str) -> Launched:
    """Make sure that the job runs, unless it has succeeded.

    Raises UsageError: no job can be made of the description. Raises JobError: an earlier attempt
    has ended but does not go away.
    """
    directory = jobs.directory_of(job_id)
    directory.path.mkdir(parents=True, exist_ok=True)
    # One process at a time looks for the job and launches it.
    with locked(directory.path / names.LAUNCH_LOCK_FILE):
        if job.kubernetes is not None and not jobs.exists(job_id):
            # Another process, elsewhere, may have launched it before: the cluster knows.
            describe(job, directory, job_id)
        launched = _launch_or_adopt(job, directory, job_id)
    get_run_logger().info(_TELL[launched.how], job_id, launched.attempt, directory.path)
    return launched


_TELL = {
    How.LAUNCHED: "Job %s is launched, attempt %d. Its directory: %s",
    How.ADOPTED: "Job %s lives, attempt %d; this flow run adopts it. Its directory: %s",
    How.FINISHED: "Job %s has succeeded in attempt %d; it is not run again. Its directory: %s",
}


def _launch_or_adopt(job: TrainingJob, directory: JobDirectory, job_id: str) -> Launched:
    history = jobs.history_of(job_id)
    attempt, end = attempts.number(history), attempts.end_of(history)
    if end is not None and end.outcome == SUCCEEDED:
        return Launched(job_id, How.FINISHED, attempt)
    alive = jobs.coordinator_of(job_id)
    if alive is not None and end is None and attempts.is_stopping(history):
        # It was stopped, and may still be writing the final checkpoint.
        _wait_until_gone(job_id, _EXIT_TIMEOUT_S + directory.spec().policy.dump_timeout_s)
    elif alive is not None and end is None:
        return Launched(job_id, How.ADOPTED, alive.attempt)
    elif attempt and end is None:
        # The coordinator died while nobody steered the job; its agents wait for another one.
        return Launched(job_id, How.ADOPTED, jobs.engine_of(job_id).revive().attempt)
    _wait_until_gone(job_id, _EXIT_TIMEOUT_S)
    # What is placed anew is the same job, whatever has become of a saved policy since.
    placed_anew = end is not None and end.outcome == RESCHEDULED
    if not placed_anew:
        describe(job, directory, job_id)
    engine = jobs.engine_of(job_id)
    with engine.watch(lambda sign: None, get_run_logger().warning):  # nobody could take a sign yet
        endpoint = engine.launch(attempt=attempt + 1)
    joined = endpoint.attempt != attempt + 1  # one that nobody knew of any more
    return Launched(job_id, How.ADOPTED if joined else How.LAUNCHED, endpoint.attempt)


def _wait_until_gone(job_id: str, limit_s: float) -> None:
    """Wait for the exit of a coordinator whose job ends. Raises JobError: it stays."""
    deadline = time.monotonic() + limit_s
    while alive := jobs.coordinator_of(job_id):
        if time.monotonic() > deadline:
            raise JobError(
                f"job {job_id} has ended, but its coordinator (process {alive.pid}) still answers "
                f"after {limit_s:.0f} s; end it and run this flow again"
            )
        time.sleep(0.05)
