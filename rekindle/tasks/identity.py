"""Find the job of a flow run: the id that a person gives, or an id that follows from its facts.

A job belongs to its description, not to the position of a call in its parent flow:

| the flow run | its job's id |
|---|---|
| gives `job_id` | this id, with the fields of the flow run |
| has no parent | NAME- and the end of the flow run's id |
| has a parent, or its job's description has changed | NAME- and the beginning of a digest |

The digest is that of the flow (or deployment), the topmost flow run, all fields of the description
that count, and the number of equal calls before this one. So a rerun of the parent, or of a task,
finds the job also if Prefect gives the subflow another task run. A call counts as another one, and
not as a rerun, if the parent (or the task that calls) has got the result of the same job before,
without a rerun in between.

The flow run has a label with the id. So hooks and other flows, which may run elsewhere, find it.
"""

from __future__ import annotations

import hashlib
import itertools
from uuid import UUID

import msgspec
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext

from rekindle import names
from rekindle.blocks.job import DEFAULT_NAME, FLOW_RUN_FIELDS, TrainingJob, fill_in_job_id
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import OtherJobError, UsageError
from rekindle.job.spec import JobSpec
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.tasks import job_access as jobs
from rekindle.tasks.description import Description, Differences, differences, digest

LABEL = "rekindle.job"
_DIGITS = 12
_LAUNCHED, _RESULT = "launched", "result"  # the first words of lines of the file of callers
_NO_ID = "undecided"  # for a description whose job has no id yet


def job_of_this_run(job: TrainingJob) -> str:
    """Return the id of the job of this process's flow run, and record it at the flow run.

    Raises JobError: there is no flow run. Raises OtherJobError: the job with the id that the user
    gives has another description. Raises UsageError: a block or a field of the id does not exist.
    """
    flow_run = jobs.this_flow_run(job.name)
    filled_in = job.filled_in()
    if filled_in.job_id:
        job_id = fill_in_job_id(filled_in.job_id, _fields(flow_run))
    else:
        job_id = _derived(flow_run, job, filled_in)
    refuse_another(job_id, job)
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, {LABEL: job_id})
    flow_run.labels[LABEL] = job_id  # for hooks in this process
    return job_id


def note_launch(job_id: str) -> None:
    """Record that this process's flow run has launched the job."""
    _note(job_id, f"{_LAUNCHED} {jobs.this_flow_run(job_id).id}")


def note_result(job_id: str) -> None:
    """Record that the call of this process's flow run has got the job's result."""
    if call := _call(jobs.this_flow_run(job_id)):
        _note(job_id, f"{_RESULT} {call}")


def content(job: TrainingJob) -> str:
    """Return a digest of all fields that count. Raises UsageError: a block does not exist."""
    return digest(_described(job.filled_in(), _NO_ID))


def recorded_job(flow_run: FlowRun) -> str:
    """Return the id of a flow run's job; the job may not exist.

    A run of an earlier version of Rekindle has no label, and neither has one that has not begun.
    """
    labels = flow_run.labels
    if LABEL not in labels:
        with get_client(sync_client=True) as client:  # the caller's record may be older
            labels = client.read_flow_run(flow_run.id).labels
    name = (flow_run.parameters.get("job") or {}).get("name", DEFAULT_NAME)
    return str(labels.get(LABEL) or jobs.job_id_of(jobs.position(flow_run), name))


def compare(job_id: str, job: TrainingJob) -> Differences | None:
    """Compare a job's description on this machine with the one that a run asks for.

    None: no such job was launched from this machine. Raises UsageError: the description is
    unreadable.
    """
    directory = jobs.directory_of(job_id)
    launched = directory.endpoint() is not None or directory.cluster.exists()
    if not launched or not jobs.exists(job_id):
        return None
    try:
        pods = None
        if directory.pods.exists():
            pods = msgspec.json.decode(directory.pods.read_bytes(), type=KubernetesSettings)
        known = Description(spec=directory.spec(), pods=pods)
    except (UsageError, msgspec.DecodeError) as error:
        raise UsageError(
            f"this version of Rekindle cannot read the description of job {job_id}, which another "
            f"version wrote ({error}); end the job with that version, or give another job_id"
        ) from error
    return differences(known, _described(job.filled_in(), job_id))


def refuse_another(job_id: str, job: TrainingJob) -> Differences | None:
    """Compare as compare() does. Raises OtherJobError: the descriptions are of different jobs."""
    found = compare(job_id, job)
    if found is None or not found.counting or _is_own(job_id, job):
        return found
    raise other_job(job_id, found)


def differs(known: JobSpec, job: TrainingJob) -> Differences:
    """Compare a description that a cluster has with the one that a run asks for, without pods."""
    wanted = _described(job.filled_in(), known.job_id)
    return differences(Description(spec=known, pods=wanted.pods), wanted)


def other_job(job_id: str, found: Differences) -> OtherJobError:
    """Return the error for an id whose job has another description."""
    return OtherJobError(
        f"job {job_id} exists with another description: {'; '.join(found.counting)}. Give another "
        "job_id, or the earlier values"
    )


def _derived(flow_run: FlowRun, job: TrainingJob, filled_in: TrainingJob) -> str:
    root, noted = _root(flow_run), str(flow_run.labels.get(LABEL) or "")
    # The id of a run without parent, and the id that earlier versions gave to a subflow.
    position = jobs.job_id_of(jobs.position(flow_run), job.name)
    changed: Differences | None = None
    for known in filter(None, dict.fromkeys((noted, position))):
        found = compare(known, filled_in)
        # Prefect can give the flow run of one subflow to another one, so its label alone is not
        # enough. The digest below gives the same id again.
        if found is None and root == flow_run.id:
            return known
        if found is not None and (not found.counting or _is_own(known, job)):
            return known
        changed = found or changed
    source = flow_run.deployment_id or flow_run.flow_id
    parts = f"{source} {root} {digest(_described(filled_in, _NO_ID))}"
    calls = (f"{parts} {number}" for number in itertools.count())
    ids = (f"{job.name}-{hashlib.sha256(each.encode()).hexdigest()[:_DIGITS]}" for each in calls)
    job_id = next(each for each in ids if not _has_result(each, flow_run))
    if changed is not None:
        get_run_logger().warning(
            "The job of this flow run had another description: %s. The run has a new job, %s",
            "; ".join(changed.counting),
            job_id,
        )
    return job_id


def _is_own(job_id: str, job: TrainingJob) -> bool:
    """Return whether this flow run has launched the job, which has not ended.

    The run then keeps it, although a block has changed since: a second job would use the devices
    of the first one. Prefect can give the flow run of another call to a rerun of a parent, so the
    parameters must be the same.
    """
    flow_run = jobs.this_flow_run(job_id)
    if f"{_LAUNCHED} {flow_run.id}" not in _callers(job_id):
        return False
    parameters = flow_run.parameters.get("job")
    if parameters is None or TrainingJob.model_validate(parameters) != job:
        return False
    end = attempts.end_of(jobs.history_of(job_id))
    return end is None or end.outcome == RESCHEDULED


def _has_result(job_id: str, flow_run: FlowRun) -> bool:
    """Return whether another call of the same run of the parent has the result of this job."""
    callers = _callers(job_id)
    return bool(callers) and f"{_RESULT} {_call(flow_run)}" in callers


def _callers(job_id: str) -> list[str]:
    file = jobs.directory_of(job_id).path / names.CALLERS_FILE
    return file.read_text().splitlines() if file.exists() else []


def _note(job_id: str, line: str) -> None:
    if line not in _callers(job_id):
        with (jobs.directory_of(job_id).path / names.CALLERS_FILE).open("a") as file:
            file.write(f"{line}\n")


def _call(flow_run: FlowRun) -> str:
    """Return the run of the task or parent that calls this flow, and how often it has run.

    The result is empty without a parent. Only the process of a task knows the task's count, so two
    calls of a deployment in one task have one text.
    """
    task = TaskRunContext.get()
    if task is not None:
        return f"{task.task_run.id} {task.task_run.run_count}"
    if flow_run.parent_task_run_id is None:
        return ""
    with get_client(sync_client=True) as client:
        place = client.read_task_run(flow_run.parent_task_run_id)
        if place.flow_run_id is None:
            return ""
        return f"{place.flow_run_id} {client.read_flow_run(place.flow_run_id).run_count}"


def _described(job: TrainingJob, job_id: str) -> Description:
    return Description(
        spec=job.unchecked_spec(job_id),
        pods=job.kubernetes,
        secret_variables=job.secret_variables,
        anywhere=not job.working_directory,
    )


def _root(flow_run: FlowRun) -> UUID:
    """Return the id of the topmost flow run, or of the task without a flow that called the flow.

    It stays the same when parents, subflows or tasks run again.
    """
    if flow_run.parent_task_run_id is not None:
        return UUID(runtime.flow_run.root_flow_run_id)
    task = TaskRunContext.get()
    return flow_run.id if task is None else task.task_run.id


def _fields(flow_run: FlowRun) -> dict[str, str]:
    """Return the fields that a job id may contain; a missing one is empty."""
    own = (name for name in FLOW_RUN_FIELDS if name != "root_id")
    values = {name: str(getattr(flow_run, name) or "") for name in own}
    return values | {"root_id": str(_root(flow_run))}
