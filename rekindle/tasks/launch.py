"""Start or adopt the job, and remove its remains: the first and last steps of the train flow."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Running

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.blocks.job_fields import left_to_mindcluster
from rekindle.engines.devices import visible_devices
from rekindle.errors import DevicesHeldError, JobError, OtherVersionError
from rekindle.file_lock import locked
from rekindle.job.spec import JobDirectory, replace_file
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.reporting.event_text import capital
from rekindle.reporting.run_state import AWAITING_DEVICES
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import (
    differs,
    is_launched,
    note_launch,
    other_job,
    refuse_another,
)
from rekindle.tasks.prefect_api.run_states import name_state
from rekindle.tasks.report import has_succeeded, refuse_lost

# A coordinator exits a moment after the end of its job.
_EXIT_TIMEOUT_S = 60.0
_DEVICES_S = 2.0  # pause between two tries to get the devices that another job has


@task(name="release", cache_policy=NO_CACHE)
def release(job_id: str) -> bool:
    """Remove the remains of an ended job; return whether all are gone.

    Remaining objects do not make the flow run fail. The next flow run of this job removes them.
    """
    return jobs.release(job_id, get_run_logger())


def describe(job: TrainingJob, directory: JobDirectory, job_id: str) -> None:
    """Write the job's description. Raises UsageError: the fields describe no valid job."""
    spec = job.to_spec(job_id)
    if job.kubernetes is None:
        directory.create(spec)
        directory.pods.unlink(missing_ok=True)
        devices = job.devices
        if devices is None:
            devices = visible_devices({**os.environ, **spec.environment})
        replace_file(directory.path / names.DEVICES_FILE, "\n".join(devices).encode())
    else:
        # First the pods: a description without pods describes a job of this machine.
        replace_file(directory.pods, msgspec.json.encode(job.kubernetes))
        directory.create(spec, logs=False)  # the pods have the logs


def describe_elsewhere(flow_run: FlowRun, job_id: str) -> None:
    """Describe a job that a flow process on another machine has placed in a cluster.

    The cluster has all other facts about it. Raises ValueError, UsageError: the parameters of the
    flow run describe no valid job.
    """
    parameters = flow_run.parameters.get("job") or {}
    if parameters.get("kubernetes") and not jobs.exists(job_id):
        directory = jobs.directory_of(job_id)
        directory.path.mkdir(parents=True, exist_ok=True)
        describe(TrainingJob.model_validate(parameters), directory, job_id)


class How(str, enum.Enum):
    """The result of launching."""

    LAUNCHED = "launched"  # a new attempt was started
    ADOPTED = "adopted"  # the job runs; nothing was started
    FINISHED = "finished"  # the job succeeded before; nothing was started


@dataclass(frozen=True, slots=True)
class Launched:
    """The job of this flow run, and the action that `launch` took."""

    job_id: str
    how: How
    attempt: int


@task(name="launch", cache_policy=NO_CACHE)
def launch(job: TrainingJob, job_id: str, pause: Callable[[float], None]) -> Launched:
    """Start or adopt the job, unless it has succeeded. Wait while another job has its devices.

    pause: waits for these seconds. It may raise an error, which ends the wait.

    Raises UsageError: the description is invalid. Raises OtherJobError: the job of this id has
    another description. Raises RecordLostError: it has succeeded, and its record is not here.
    Raises OtherVersionError: it lives, and another version of Rekindle has started it. Raises
    JobError: an earlier attempt has ended, but its coordinator still runs.
    """
    refuse_lost(job_id, job)
    directory = jobs.directory_of(job_id)
    directory.path.mkdir(parents=True, exist_ok=True)
    log, told = get_run_logger(), ""
    while True:
        # One process at a time looks for the job and launches it.
        with locked(directory.path / names.LAUNCH_LOCK_FILE):
            if job.kubernetes is not None and not is_launched(job_id):
                _join_the_cluster(job, directory, job_id)
            found = refuse_another(job_id, job)
            try:
                launched = _launch_or_adopt(job, directory, job_id)
                break
            except DevicesHeldError as error:
                held = str(error)
        if held != told:
            log.info("%s", held)
            waiting: State[Any] = Running(name=AWAITING_DEVICES, message=capital(held))
            name_state(jobs.this_flow_run(job_id).id, waiting, log)
            told = held
        pause(_DEVICES_S)
    if told:
        name_state(jobs.this_flow_run(job_id).id, Running(), log)
    log.info(_TELL[launched.how], job_id, launched.attempt, directory.path)
    if launched.how is How.LAUNCHED:
        note_launch(job_id)
        if left := left_to_mindcluster(job.filled_in().policy, job.kubernetes):
            log.info("MindCluster has the strategies %s; Rekindle does not use them", left)
    elif launched.how is How.ADOPTED and found is not None and any(found):
        kept = ", ".join((*found.counting, *found.others))
        log.warning("The running job keeps its own values of %s", kept)
    return launched


_TELL = {
    How.LAUNCHED: "Rekindle launched job %s, attempt %d. Its directory: %s",
    How.ADOPTED: "Job %s runs, attempt %d; this flow run adopts it. Its directory: %s",
    How.FINISHED: "Job %s has succeeded in attempt %d, and does not run again. Its directory: %s",
}


def _join_the_cluster(job: TrainingJob, directory: JobDirectory, job_id: str) -> None:
    """Describe a job that a process on another machine may have launched. The cluster knows that.

    Raises OtherJobError: the cluster has a job of this id with another description.
    """
    from rekindle.engines.kubernetes.engine import engine_for  # imports the client only on use

    describe(job, directory, job_id)
    known = engine_for(directory).described()
    if known is None:
        return
    found = differs(known, job)
    if found.counting:
        (directory.path / names.SPEC_FILE).unlink()
        raise other_job(job_id, found)


def _launch_or_adopt(job: TrainingJob, directory: JobDirectory, job_id: str) -> Launched:
    history = jobs.history_of(job_id)
    attempt, end = attempts.number(history), attempts.end_of(history)
    if has_succeeded(job, job_id):
        return Launched(job_id, How.FINISHED, attempt)
    alive = jobs.coordinator_of(job_id)
    if alive is not None and end is None and attempts.is_stopping(history):
        # It was stopped, and may still write the final checkpoint.
        _wait_until_gone(job_id, _EXIT_TIMEOUT_S + directory.spec().policy.dump_timeout_s)
    elif alive is not None and end is None:
        if alive.wire != names.WIRE_VERSION:
            what = f"the coordinator of job {job_id}"
            raise OtherVersionError.of(what, alive.wire or "of an earlier one", names.WIRE_VERSION)
        return Launched(job_id, How.ADOPTED, alive.attempt)
    elif attempt and end is None:
        # The coordinator failed while no process steered the job. Its agents wait for another one.
        return Launched(job_id, How.ADOPTED, jobs.engine_of(job_id).revive().attempt)
    _wait_until_gone(job_id, _EXIT_TIMEOUT_S)
    # A rescheduled job keeps its description, even if a saved policy has changed since.
    placed_anew = end is not None and end.outcome == RESCHEDULED
    if not placed_anew:
        describe(job, directory, job_id)
    engine = jobs.engine_of(job_id)
    with engine.watch(
        lambda health_event: None, get_run_logger().warning
    ):  # no receiver of events yet
        endpoint = engine.launch(attempt=attempt + 1)
    joined = endpoint.attempt != attempt + 1  # a later attempt, unknown to this machine
    return Launched(job_id, How.ADOPTED if joined else How.LAUNCHED, endpoint.attempt)


def _wait_until_gone(job_id: str, limit_s: float) -> None:
    """Wait for the exit of an ending job's coordinator. Raises JobError: it still answers."""
    deadline = time.monotonic() + limit_s
    while alive := jobs.coordinator_of(job_id):
        if time.monotonic() > deadline:
            raise JobError(
                f"job {job_id} has ended, but its coordinator (process {alive.pid}) still answers "
                f"after {limit_s:.0f} s; end it and run this flow again"
            )
        time.sleep(0.05)
