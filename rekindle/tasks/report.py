"""Write results as artifacts and files: of the job, and of checked nodes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.logging.loggers import flow_run_logger

from rekindle import names
from rekindle.blocks.forms import of_form
from rekindle.blocks.job import TrainingJob
from rekindle.checkpoints.location import below
from rekindle.errors import JobFailedError, OtherJobError, RecordLostError
from rekindle.file_lock import locked
from rekindle.job.spec import JobDirectory, replace_file
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import RESCHEDULED, SUCCEEDED, AnyEvent, NodeChecked
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import SICK
from rekindle.reporting.event_text import incident_row, outcome, resumed_text, short_row
from rekindle.reporting.step_records import sample_records
from rekindle.reporting.summary import (
    last_failure,
    markdown_report,
    newest_checkpoint,
    summarize,
)
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import content, content_of
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.notifier import find_artifact, progress_key
from rekindle.waiting import until

ARTIFACT = "checked-nodes"
_PAUSE_S = 1.0
_STOP_S = 20.0  # for a job that was ordered to stop, besides the final checkpoint


@task(name="report-nodes", cache_policy=NO_CACHE)
def report_nodes(job_id: str) -> list[dict[str, Any]]:
    """Show each node's result, unhealthy nodes first; return it as plain values, times in ms."""
    checks = [event for event in jobs.history_of(job_id) if isinstance(event, NodeChecked)]
    checks.sort(key=lambda each: (each.verdict.health not in SICK, each.host))
    rows = [_row(check) for check in checks]
    if rows:
        sick = sum(each.verdict.health in SICK for each in checks)
        summary = f"job {job_id} checked {len(rows)} nodes; {sick} are faulty or slow"
        create_table_artifact(rows, key=ARTIFACT, description=summary)
        (get_run_logger().warning if sick else get_run_logger().info)(summary)
    return rows


def _row(check: NodeChecked) -> dict[str, Any]:
    verdict = check.verdict
    row: dict[str, Any] = {
        "host": check.host or check.address,
        "verdict": verdict.health.value,
        "why": verdict.reason,
        "isolated": check.fault is not None,
    }
    for part in Measurement:
        if part in verdict.seconds:
            row[f"{part.value} (ms)"] = round(verdict.seconds[part] * 1e3, 3)
    return row


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job that has ended.

    `outcome`: "succeeded", "failed" or "stopped". `finished`: the number of finished steps.
    `goodput`: the share of the time in which the job made progress, 0 to 1. It is None if the
    script has no Session. `steps_lost`: the repeated steps; None if ranks without a Session
    restarted. `incidents`: a row of the incident table each, times in ms. `report` and `timeline`
    are paths of files.
    """

    job_id: str
    outcome: str
    reason: str
    finished: int
    attempts: int
    steps_lost: int | None
    goodput: float | None
    incidents: list[dict[str, str | int | float | None]]
    report: str
    timeline: str

    def raise_if_failed(self) -> None:
        """Raise JobFailedError unless the job has succeeded. The flow run fails with it."""
        if self.outcome != SUCCEEDED:
            raise JobFailedError(
                f"job {self.job_id} {outcome(self.outcome, self.finished)}: "
                f"{of_form(self.reason)}; "
                f"see its report: {self.report}"
            )


@task(name="report", cache_policy=NO_CACHE)
def report(job_id: str) -> JobResult:
    """Write the incident table, the report and the timeline, and return the job's result."""
    with get_client(sync_client=True) as client:
        _wait_for_prefect(client, get_run_logger())
        run, history = UUID(runtime.flow_run.id), jobs.history_of(job_id)
        return _write(client, job_id, run, history, get_run_logger())


def report_later(job_id: str, flow_run_id: UUID) -> None:
    """Start a process that writes the same for a job that ends, and whose flow has no process.

    Prefect waits for a hook before it sets the state of the run, so a hook must not wait itself.
    """
    command = [sys.executable, "-m", "rekindle.tasks.report", job_id, str(flow_run_id)]
    subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a runner that ends takes its own group with it
    )


def _report_stopped(job_id: str, flow_run_id: UUID) -> None:
    """Wait for the end of a job, and report it. A rerun may begin another attempt, and report."""
    directory = jobs.directory_of(job_id)
    limit_s = _STOP_S + directory.spec().policy.dump_timeout_s
    attempt = attempts.number(jobs.history_of(job_id))

    def is_over() -> bool:
        history = jobs.history_of(job_id)
        return attempts.end_of(history) is not None or attempts.number(history) > attempt

    ended = until(is_over, limit_s, 0.5)
    with get_client(sync_client=True) as client:
        log = flow_run_logger(client.read_flow_run(flow_run_id))
        history = jobs.history_of(job_id)
        if not ended:
            log.warning("Job %s did not end within %g s; it has no report", job_id, limit_s)
        elif attempts.end_of(history) is not None and attempts.number(history) == attempt:
            _write(client, job_id, flow_run_id, history, log)
            forget_keys(job_id)


def _write(
    client: SyncPrefectClient, job_id: str, flow_run_id: UUID, history: list[AnyEvent], log: Log
) -> JobResult:
    """Write all for this history; a rerun may have begun another attempt by now."""
    # Here, because matplotlib is slow to import, and a flow process must adopt a job quickly.
    from rekindle.reporting.timeline import MOST_RANKS, draw

    summary = summarize(job_id, history)
    if summary.outcome == SUCCEEDED:
        _complete_progress(client, job_id, flow_run_id, summary.finished)
    directory = jobs.directory_of(job_id)
    picture = directory.path / names.TIMELINE_FILE
    draw(history, sample_records(directory.path, ranks=MOST_RANKS), picture)
    rows = [incident_row(incident) for incident in summary.incidents]
    text = markdown_report(
        summary,
        resumed=resumed_text(history),
        logs=directory.spec().log_directory,
        checkpoint=where_is_newest(directory, history),
    )
    (directory.path / names.REPORT_FILE).write_text(f"{text}\n![Timeline]({names.TIMELINE_FILE})\n")
    encoded = base64.b64encode(picture.read_bytes()).decode()

    def show(kind: str, what: str, data: str, description: str) -> None:
        key = f"{job_id}-{what}"
        client.create_artifact(
            ArtifactCreate(
                key=key, type=kind, data=data, description=description, flow_run_id=flow_run_id
            )
        )

    if rows:
        short = [short_row(incident) for incident in summary.incidents]
        show("table", "incidents", json.dumps(short), f"Incidents of job {job_id}")
    end = outcome(summary.outcome, summary.finished)
    shown = f"{text}\n![Timeline](data:image/png;base64,{encoded})\n"
    show("markdown", "report", shown, f"Job {job_id} {end}")
    log.info("Report: %s, timeline: %s", directory.path / names.REPORT_FILE, picture)
    return JobResult(
        job_id=job_id,
        outcome=summary.outcome,
        reason=summary.reason,
        finished=summary.finished,
        attempts=summary.attempts,
        steps_lost=summary.steps_lost,
        goodput=summary.goodput,
        incidents=rows,
        report=str(directory.path / names.REPORT_FILE),
        timeline=str(picture),
    )


def forget_keys(job_id: str) -> None:
    """Remove the keys of the store from the description of a job that has ended.

    The next attempt gets them from the block again.
    """
    if not jobs.exists(job_id):
        return
    directory = jobs.directory_of(job_id)
    with locked(directory.path / names.LAUNCH_LOCK_FILE):
        end = attempts.end_of(jobs.history_of(job_id))
        if end is None or end.outcome == RESCHEDULED:
            return
        spec = directory.spec()
        kept = {
            name: value for name, value in spec.environment.items() if name not in names.STORE_KEYS
        }
        if len(kept) < len(spec.environment):
            spec = msgspec.structs.replace(spec, environment=kept)
            replace_file(directory.path / names.SPEC_FILE, msgspec.json.encode(spec))


def where_is_newest(directory: JobDirectory, history: list[AnyEvent]) -> str:
    """Return the newest checkpoint with an address for other machines, or "" without one.

    A folder has the name of its machine before it, as for ssh.
    """
    written = newest_checkpoint(history)
    if written is None:
        return ""
    store = directory.spec().checkpoint_store
    if "://" in store:  # the path in the event has no endpoint
        where = below(store, written.path.rpartition("/")[2])
    else:
        host = "the pods" if directory.pods.exists() else socket.gethostname()
        where = f"{host}:{written.path}"
    return f"step {written.step}, at `{where}`"


def unsaved(job_id: str) -> str:
    """Return in a sentence that a job has trained to the end without its last checkpoint, or ""."""
    directory, history = jobs.directory_of(job_id), jobs.history_of(job_id)
    end, failed = attempts.end_of(history), last_failure(history)
    if end is None or end.outcome != SUCCEEDED or failed is None:
        return ""
    if not directory.spec().checkpoint_every:
        return ""
    newest = where_is_newest(directory, history) or "none"
    return (
        f"job {job_id} has finished training after step {end.finished}, but could not write its "
        f"last checkpoint: {failed.message}. Its newest checkpoint: {newest}"
    )


def has_succeeded(job: TrainingJob, job_id: str) -> bool:
    """Return whether the job has succeeded on this machine, with all that its description asks."""
    end = attempts.end_of(jobs.history_of(job_id))
    if end is None or end.outcome != SUCCEEDED:
        return False
    return not (unsaved(job_id) and job.filled_in().checkpoint.required)


_COLUMNS = {field.name for field in dataclasses.fields(JobResult)} | {
    *("description", "host", "directory")
}


def record_result(job: TrainingJob, result: JobResult) -> None:
    """Record in Prefect that the job has succeeded. Other machines do not have its directory."""
    row = {
        **dataclasses.asdict(result),
        "incidents": len(result.incidents),
        "description": content_of(result.job_id, job),
        "host": socket.gethostname(),
        "directory": str(jobs.directory_of(result.job_id).path),
    }
    if _result_row(result.job_id) is not None:
        return
    create_table_artifact(
        [row],
        key=_result_key(result.job_id),
        description=f"Job {result.job_id} has succeeded, and does not run again",
    )


def refuse_lost(job_id: str, job: TrainingJob) -> None:
    """Check that a job has not succeeded before without a record of that on this machine.

    An earlier attempt may have failed here, and a later one succeeded on another machine.

    Raises RecordLostError: it has. Raises OtherJobError: it has, with another description.
    """
    history = jobs.history_of(job_id)
    end = attempts.end_of(history)
    if history and (end is None or end.outcome == SUCCEEDED):
        return  # it runs, or its record is here
    row = _result_row(job_id)
    if row is None:
        return
    where = f"{row['directory']} on {row['host']}"
    if row["description"] != content(job):
        raise OtherJobError(
            f"job {job_id} has succeeded with another description, and its record was in {where}. "
            "Give another job_id, or the earlier values"
        )
    raise RecordLostError(
        f"job {job_id} has succeeded after {row['finished']} steps, and does not run again. Its "
        f"record was in {where}, and its report is the artifact {job_id}-report. Run this flow run "
        f"there, start a new one, or delete the artifact {_result_key(job_id)} to train again"
    )


def lost_result(job_id: str) -> JobResult:
    """Return the result of a job whose record is not on this machine, without its incidents."""
    row = _result_row(job_id)
    assert row is not None  # refuse_lost() has found it
    fields = {field.name: row[field.name] for field in dataclasses.fields(JobResult)}
    return JobResult(**fields | {"incidents": []})


def _result_row(job_id: str) -> dict[str, Any] | None:
    """Return the newest record of the job's success in Prefect; None: there is none.

    A user's own flow may have made an artifact with the same key. It has other columns.
    """
    named = ArtifactFilter(key=ArtifactFilterKey(any_=[_result_key(job_id)]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=named, sort=ArtifactSort.CREATED_DESC)
    for artifact in found:
        with contextlib.suppress(ValueError):
            match json.loads(str(artifact.data)):
                case [dict() as row] if row.keys() >= _COLUMNS and row["job_id"] == job_id:
                    return row
    return None


def _result_key(job_id: str) -> str:
    return f"{job_id}-result"


def _wait_for_prefect(client: SyncPrefectClient, log: Log) -> None:
    """Wait until Prefect's API answers, so that it also receives the end of the flow run."""
    failing = False
    while (error := client.api_healthcheck()) is not None:
        if not failing:
            log.warning("Prefect's API fails; the report waits for it: %r", error)
        failing = True
        time.sleep(_PAUSE_S)


def _complete_progress(
    client: SyncPrefectClient, job_id: str, flow_run_id: UUID, finished: int
) -> None:
    """Show that all steps are done, because the process that should have done it may have failed.

    A script without a number of steps has no progress to show.
    """
    key, words = progress_key(job_id), f"all {finished} steps are done"
    artifact = find_artifact(client, key)
    if artifact is None and finished:
        done = ArtifactCreate(key=key, type="progress", data=100.0, description=words)
        client.create_artifact(done.model_copy(update={"flow_run_id": flow_run_id}))
    elif artifact is not None and artifact.data != 100:
        client.update_artifact(artifact.id, ArtifactUpdate(data=100.0, description=words))


if __name__ == "__main__":
    _report_stopped(sys.argv[1], UUID(sys.argv[2]))
