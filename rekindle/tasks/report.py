"""Write results as artifacts and files: of the job, and of checked nodes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.errors import JobFailedError, OtherJobError, RecordLostError
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import SUCCEEDED, NodeChecked
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import SICK
from rekindle.reporting.event_text import incident_row, outcome, resumed_text
from rekindle.reporting.step_records import sample_records
from rekindle.reporting.summary import markdown_report, summarize
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import content, content_of
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.notifier import find_artifact, progress_key

ARTIFACT = "checked-nodes"
_PAUSE_S = 1.0


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
                f"job {self.job_id} {outcome(self.outcome, self.finished)}: {self.reason}; "
                f"see its report: {self.report}"
            )


@task(name="report", cache_policy=NO_CACHE)
def report(job_id: str) -> JobResult:
    """Write the incident table, the report and the timeline, and return the job's result."""
    # Here, because matplotlib is slow to import, and a flow process must adopt a job quickly.
    from rekindle.reporting.timeline import MOST_RANKS, draw

    with get_client(sync_client=True) as client:
        _wait_for_prefect(client, get_run_logger())
        history = jobs.history_of(job_id)
        summary = summarize(job_id, history)
        if summary.outcome == SUCCEEDED:
            _complete_progress(client, job_id, summary.finished)
    directory = jobs.directory_of(job_id)
    picture = directory.path / names.TIMELINE_FILE
    draw(history, sample_records(directory.path, ranks=MOST_RANKS), picture)
    rows = [incident_row(incident) for incident in summary.incidents]
    logs = directory.spec().log_directory
    text = markdown_report(summary, resumed=resumed_text(history), logs=logs)
    (directory.path / names.REPORT_FILE).write_text(f"{text}\n![Timeline]({names.TIMELINE_FILE})\n")
    encoded = base64.b64encode(picture.read_bytes()).decode()
    if rows:
        title = f"Incidents of job {job_id}"
        create_table_artifact(rows, key=f"{job_id}-incidents", description=title)
    create_markdown_artifact(
        f"{text}\n![Timeline](data:image/png;base64,{encoded})\n",
        key=f"{job_id}-report",
        description=f"Job {job_id} {outcome(summary.outcome, summary.finished)}",
    )
    get_run_logger().info("Report: %s, timeline: %s", directory.path / names.REPORT_FILE, picture)
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


def _complete_progress(client: SyncPrefectClient, job_id: str, finished: int) -> None:
    """Show that all steps are done, because the process that should have done it may have failed.

    A script without a number of steps has no progress to show.
    """
    key, words = progress_key(job_id), f"all {finished} steps are done"
    artifact = find_artifact(client, key)
    if artifact is None and finished:
        run = UUID(runtime.flow_run.id)
        client.create_artifact(
            ArtifactCreate(key=key, type="progress", data=100.0, description=words, flow_run_id=run)
        )
    elif artifact is not None and artifact.data != 100:
        client.update_artifact(artifact.id, ArtifactUpdate(data=100.0, description=words))
