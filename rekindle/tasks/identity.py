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
not as a rerun, if another call in the same run of the parent has got the result of the same job.

A flow run keeps its id if a person renames it. It also keeps the id of a job that runs if a block
gives another id since.

The flow run has a label with the id. So hooks and other flows, which may run elsewhere, find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import msgspec
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.types import KeyValueLabels

from rekindle import names
from rekindle.blocks.job import DEFAULT_NAME, FLOW_RUN_FIELDS, TrainingJob, fill_in_job_id
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import OtherJobError, UsageError
from rekindle.job.spec import JobDirectory, JobSpec
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.tasks import job_access as jobs
from rekindle.tasks.description import Description, Differences, differences, digest

LABEL = "rekindle.job"
_TEMPLATE_LABEL = "rekindle.job-id"  # the text that the user gives, with the names of fields
_DIGITS = 12
_LAUNCHED, _RESULT = "launched", "result"  # the first words of lines of the file of callers
_NO_ID = "undecided"  # for a description whose job has no id yet
_NONE = "-"


class Call(NamedTuple):
    """A call of the flow.

    flow_run: the run that the call has made. parent, parent_run: the calling flow run, and how
    often it has run. task, task_run: the calling task run, and how often it has run. Only the
    process of a task knows it, so a call of a deployment in a task has no task here.
    """

    flow_run: str
    parent: str
    parent_run: str
    task: str
    task_run: str

    def repeats(self, earlier: Call) -> bool:
        """Return whether this call is a rerun of an earlier one, or another call."""
        if self.flow_run == earlier.flow_run or self[1:3] != earlier[1:3]:
            return True
        if self.parent == self.task == _NONE:
            return True  # nobody calls twice
        return self.task == earlier.task != _NONE and self.task_run != earlier.task_run


def job_of_this_run(job: TrainingJob) -> str:
    """Return the id of the job of this process's flow run, and record it at the flow run.

    Raises JobError: there is no flow run. Raises OtherJobError: the job with the id that the user
    gives has another description. Raises UsageError: a block or a field of the id does not exist.
    """
    flow_run = jobs.this_flow_run(job.name)
    filled_in = job.filled_in()
    if filled_in.job_id:
        job_id = _given(flow_run, job, filled_in.job_id)
    else:
        job_id = _derived(flow_run, job, filled_in)
    refuse_another(job_id, job)
    labels: KeyValueLabels = {LABEL: job_id}
    if flow_run.labels.get(LABEL) != job_id:
        labels[_TEMPLATE_LABEL] = filled_in.job_id  # it gives this id
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, labels)
    flow_run.labels.update(labels)  # for hooks in this process
    return job_id


def note_launch(job_id: str) -> None:
    """Record that this process's flow run has launched the job."""
    _note(job_id, f"{_LAUNCHED} {jobs.this_flow_run(job_id).id}")


def note_result(job_id: str) -> None:
    """Record that the call of this process's flow run has got the job's result."""
    _note(job_id, " ".join((_RESULT, *_call(jobs.this_flow_run(job_id)))))


def content(job: TrainingJob) -> str:
    """Return a digest of all fields that count. Raises UsageError: a block does not exist."""
    return digest(_described(job.filled_in(), _NO_ID))


def content_of(job_id: str, job: TrainingJob) -> str:
    """Return the same digest for the job on this machine. It may differ: a block has changed since.

    Raises UsageError: the description is unreadable.
    """
    wanted = _described(job.filled_in(), job_id)
    known = _known(jobs.directory_of(job_id))
    return digest(
        msgspec.structs.replace(known, secret_variables=wanted.secret_variables, below=wanted.below)
    )


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
    if not is_launched(job_id):
        return None
    known = _known(jobs.directory_of(job_id))
    return differences(known, _described(job.filled_in(), job_id))


def is_launched(job_id: str) -> bool:
    """Return whether this machine has launched the job, or has found it in its cluster."""
    directory = jobs.directory_of(job_id)
    launched = directory.endpoint() is not None or directory.cluster.exists()
    return launched and jobs.exists(job_id)


def _known(directory: JobDirectory) -> Description:
    try:
        pods = None
        if directory.pods.exists():
            pods = msgspec.json.decode(directory.pods.read_bytes(), type=KubernetesSettings)
        return Description(spec=directory.spec(), pods=pods)
    except (UsageError, msgspec.DecodeError) as error:
        raise UsageError(
            f"this version of Rekindle cannot read the description of job {directory.path.name}, "
            f"which another version wrote ({error}); end the job with that version, or give "
            "another job_id"
        ) from error


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


def _given(flow_run: FlowRun, job: TrainingJob, template: str) -> str:
    """Return the id that the user gives, or the earlier id of this flow run if it stays."""
    job_id = fill_in_job_id(template, _fields(flow_run))
    noted = str(flow_run.labels.get(LABEL) or "")
    if noted in ("", job_id):
        return job_id
    renamed = flow_run.labels.get(_TEMPLATE_LABEL) == template
    if not renamed and not _is_own(noted, job):
        return job_id
    get_run_logger().warning(
        "This flow run keeps its job %s; job_id gives %s by now, because %s. Start a new flow run "
        "for that job",
        noted,
        job_id,
        "the run was renamed" if renamed else "a block has changed",
    )
    return noted


def _derived(flow_run: FlowRun, job: TrainingJob, filled_in: TrainingJob) -> str:
    root, noted = _root(flow_run), str(flow_run.labels.get(LABEL) or "")
    call = _call(flow_run)
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
            if not _has_result(known, call):
                return known
            found = None  # no change, but another call
        changed = found or changed
    source = flow_run.deployment_id or flow_run.flow_id
    parts = f"{source} {root} {digest(_described(filled_in, _NO_ID))}"
    calls = (f"{parts} {number}" for number in itertools.count())
    ids = (f"{job.name}-{hashlib.sha256(each.encode()).hexdigest()[:_DIGITS]}" for each in calls)
    job_id = next(each for each in ids if not _has_result(each, call))
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


def _has_result(job_id: str, call: Call) -> bool:
    """Return whether another call of the same run of the parent has the result of this job."""
    noted = (line.split() for line in _callers(job_id))
    return any(word == _RESULT and not call.repeats(Call(*of)) for word, *of in noted)


def _callers(job_id: str) -> list[str]:
    file = jobs.directory_of(job_id).path / names.CALLERS_FILE
    return file.read_text().splitlines() if file.exists() else []


def _note(job_id: str, line: str) -> None:
    if line not in _callers(job_id):
        with (jobs.directory_of(job_id).path / names.CALLERS_FILE).open("a") as file:
            file.write(f"{line}\n")


def _call(flow_run: FlowRun) -> Call:
    """Return the call that has made this process's flow run.

    A parent that a person has deleted since does not call again, and counts as none.
    """
    parent = parent_run = _NONE
    if flow_run.parent_task_run_id is not None:
        with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
            place = client.read_task_run(flow_run.parent_task_run_id)
            if place.flow_run_id is not None:
                runs = client.read_flow_run(place.flow_run_id).run_count
                parent, parent_run = str(place.flow_run_id), str(runs)
    context = TaskRunContext.get()
    task, task_run = (
        (_NONE, _NONE)
        if context is None
        else (str(context.task_run.id), str(context.task_run.run_count))
    )
    return Call(str(flow_run.id), parent, parent_run, task, task_run)


def _described(job: TrainingJob, job_id: str) -> Description:
    folder = Path(job.working_directory).expanduser()
    return Description(
        spec=job.unchecked_spec(job_id),
        pods=job.kubernetes,
        secret_variables=job.secret_variables,
        below=None if folder.is_absolute() else len(folder.parts),
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
