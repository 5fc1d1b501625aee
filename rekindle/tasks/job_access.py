"""Access the job of a flow run: its id, its directory, its engine and its history."""

from __future__ import annotations

from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from rekindle import names
from rekindle.engines.base import Engine
from rekindle.engines.client import JobClient
from rekindle.engines.hosts import simulated_hosts
from rekindle.engines.local import LocalEngine
from rekindle.errors import JobError, UsageError
from rekindle.job.spec import Endpoint, JobDirectory, job_directory
from rekindle.recovery.journal.journal import AnyEvent
from rekindle.tasks.prefect_api import Log


def job_id_of(flow_run_id: UUID, name: str) -> str:
    """Return the job id that the end of this id gives.

    A UUID may begin with the time (version 7). So its end distinguishes flow runs.
    """
    return f"{name}-{flow_run_id.hex[-12:]}"


def position(flow_run: FlowRun) -> UUID:
    """Return the id of a flow run's place: its task run in the parent, or its own id.

    A rerun of a parent may give the place to another call (`rekindle.tasks.identity`).
    """
    return flow_run.parent_task_run_id or flow_run.id


def this_flow_run(job: str) -> FlowRun:
    """Return this process's flow run. job: for the error. Raises JobError: there is none."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise JobError(f"job {job!r} belongs to a flow run; call this function in a flow run")
    return context.flow_run


def directory_of(job_id: str) -> JobDirectory:
    """Return the job's directory. The job may not exist."""
    return JobDirectory(job_directory(job_id))


def engine_of(job_id: str) -> Engine:
    """Return the engine that places this job's attempts.

    Raises UsageError: the job or its cluster does not exist.
    """
    directory = directory_of(job_id)
    if directory.pods.exists():
        from rekindle.engines.kubernetes.engine import engine_for  # imports the client only on use

        return engine_for(directory)
    return LocalEngine(directory, hosts=simulated_hosts(directory.spec()))


def coordinator_of(job_id: str) -> Endpoint | None:
    """Return the address of the job's coordinator if it runs and answers."""
    return engine_of(job_id).alive() if exists(job_id) else None


def client_of(job_id: str, endpoint: Endpoint) -> JobClient:
    """Return a client of the job's coordinator."""
    return engine_of(job_id).client(endpoint)


def release(job_id: str, log: Log) -> bool:
    """Remove the remains of an ended job from the cluster; return whether all are gone."""
    try:
        engine_of(job_id).release()
    except (JobError, UsageError) as error:
        log.warning("Some objects of job %s remain in the cluster: %s", job_id, error)
        return False
    return True


def history_of(job_id: str) -> list[AnyEvent]:
    """Read all events of the job, of all its attempts; an empty list if there is no job."""
    return engine_of(job_id).history() if exists(job_id) else []


def exists(job_id: str) -> bool:
    """Return whether this machine has a description of a job with this id."""
    return (directory_of(job_id).path / names.SPEC_FILE).exists()
