"""Check a job before its launch: the first step of each flow.

A mistake ends the run once: the message of its state is one line with the field and the remedy, and
no hook runs it again. If a store, a cluster or Prefect does not answer, the check waits for it,
and the state of the run says so. A run whose job lives or has succeeded is not checked.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed, Running

from rekindle.blocks.forms import of_form, read
from rekindle.blocks.job import TrainingJob
from rekindle.errors import CheckpointError, JobError, RecordLostError, UsageError
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.flow_runs import CANNOT_START
from rekindle.reporting.run_state import WAITING
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import job_of_this_run
from rekindle.tasks.job_checks import (
    Check,
    checks_of_job,
    checks_of_places,
    checks_of_retraining,
)
from rekindle.tasks.prefect_api.run_states import name_state
from rekindle.tasks.report import has_succeeded, refuse_lost
from rekindle.tasks.retraining import Retraining

_ANSWER_S = 15.0  # after this time the state of the run says that a check waits
_PAUSE_S = 5.0
_REFUSED = "Refused"


def accepted(job: Any, around: Retraining | None = None) -> tuple[TrainingJob, str]:
    """Return the job of this process's flow run and its id, after all checks.

    job: as a person gives it, or an object. Raises UsageError: a mistake, in one line.
    """
    job = read(TrainingJob, job, "job")
    job_id = job_of_this_run(job)
    state = check(job, job_id, around, return_state=True)
    if state.name == _REFUSED:
        raise UsageError(state.message or "")
    state.result()
    return job, job_id


def refused(error: UsageError) -> Any:
    """Return the state of a run that this mistake ends. Prefect logs no traceback for it."""
    return Failed(message=f"{CANNOT_START}{_in_one_line(error)}", data=error)


def named(name: str, message: str, result: object) -> Any:
    """Return a state of type COMPLETED with this name for a run with this result."""
    return Completed(name=name, message=message, data=result)


@task(name="check", cache_policy=NO_CACHE)
def check(job: TrainingJob, job_id: str, around: Retraining | None) -> State[None] | None:
    """Load all blocks, and check each field. The state Refused has the first mistake."""
    field = "job"
    try:
        if not _starts(job, job_id):
            return None
        for field, look in _checks(job, job_id, around):
            found = _until_answered(Check(field, look))
            if isinstance(found, str) and found:
                get_run_logger().warning("%s: %s", field, found)
    except UsageError as error:
        return Failed(name=_REFUSED, message=f"{field}: {_in_one_line(error)}")
    return None


def _checks(job: TrainingJob, job_id: str, around: Retraining | None) -> Iterator[Check]:
    filled_in = job.filled_in()
    deployment = jobs.this_flow_run(job_id).deployment_id
    yield from checks_of_places(filled_in, around, deployment)
    yield from checks_of_job(filled_in, job_id, job.saved_store)
    if around is not None:
        yield from checks_of_retraining(filled_in, around)


def _starts(job: TrainingJob, job_id: str) -> bool:
    """Return whether the run will launch a job; otherwise it adopts one, or takes a result."""
    try:
        refuse_lost(job_id, job)
    except RecordLostError:
        return False
    end = attempts.end_of(history := jobs.history_of(job_id))
    if end is not None:
        return end.outcome != RESCHEDULED and not has_succeeded(job, job_id)
    return not attempts.number(history) and jobs.coordinator_of(job_id) is None


def _until_answered(one: Check) -> object:
    """Return the result of a check, and repeat the check while something does not answer.

    A file system may hang, so a thread does the check.
    """
    trial, told = _begin(one), ""
    while True:
        try:
            found = trial.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            why, again = f"no answer within {_ANSWER_S:g} s", False
        except (CheckpointError, JobError) as error:
            why, again = _in_one_line(error), True
        else:
            if told:
                name_state(_own(), Running(), get_run_logger())
            return found
        if told != why:
            told = why
            text = f"{one.field}: {why}; Rekindle tries again until it answers"
            get_run_logger().warning("%s", text)
            waiting: State[Any] = Running(name=WAITING, message=text)
            name_state(_own(), waiting, get_run_logger())
        if again:
            time.sleep(_PAUSE_S)
            trial = _begin(one)


def _begin(one: Check) -> concurrent.futures.Future[object]:
    trial: concurrent.futures.Future[object] = concurrent.futures.Future()
    context = contextvars.copy_context()  # has Prefect's settings

    def look() -> None:
        try:
            trial.set_result(context.run(one.look))
        except BaseException as error:
            trial.set_exception(error)

    threading.Thread(target=look, name="rekindle-check", daemon=True).start()
    return trial


def _own() -> UUID:
    return UUID(runtime.flow_run.id)


def _in_one_line(error: Exception) -> str:
    return of_form(" ".join(str(error).split()))
